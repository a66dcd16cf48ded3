"""T3 as a model class of SGLang."""
