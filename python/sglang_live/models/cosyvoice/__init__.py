"""CosyVoice 2 and 3: a Qwen2 that writes one code of S3 per step, and a flow behind it."""
