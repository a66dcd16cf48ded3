"""MOSS-TTS: a Qwen3 that writes 32 books with a delay, beside a channel that tells the end."""
