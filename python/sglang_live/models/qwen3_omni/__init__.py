"""Qwen3-Omni: thinker (hears and thinks), talker (speaks codec frames), Code2Wav (vocoder)."""
