"""SmolLM2 Instruct: a checkpoint in Hugging Face's layout from the package's GGUF file."""
