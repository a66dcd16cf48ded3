"""Whisper: speech recognition in many languages, through CTranslate2."""
