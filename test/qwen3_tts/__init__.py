"""A tiny Qwen3-TTS checkpoint and the reference computation, for unit and engine tests."""
