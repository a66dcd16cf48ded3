"""Model classes that are shared by families; SGLang loads those of a family."""
