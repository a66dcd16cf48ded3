"""The built-in model: a tiny checkpoint of exactly the Qwen3-Omni architecture."""
