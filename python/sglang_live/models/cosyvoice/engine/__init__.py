"""The language model of CosyVoice as a model class of SGLang."""
