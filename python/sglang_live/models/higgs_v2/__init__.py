"""Higgs Audio v2: a Llama with a second FFN for audio, whose books are written with a delay."""
