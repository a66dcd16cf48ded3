"""Qwen3-TTS: a language model that speaks text, and the decoder of its 12.5 Hz codec."""
