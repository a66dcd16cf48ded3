"""Orpheus: a Llama that writes the codes of SNAC, and speaks the text of any language model."""
