"""Chatterbox Turbo: a GPT-2 that writes one code of S3 per step, and a flow of two steps."""
