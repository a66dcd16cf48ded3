"""Chatterbox: a guided Llama, T3, that writes one code of S3 per step, and a flow behind it."""
