"""T3 of Turbo as a model class of SGLang."""
