"""CSM: a Llama that writes frames of Mimi's codes, and speaks the text of any language model."""
