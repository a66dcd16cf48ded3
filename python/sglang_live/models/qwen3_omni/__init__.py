"""Qwen3-Omni: thinker (audio and text to text), talker (codec frames), Code2Wav (vocoder)."""
