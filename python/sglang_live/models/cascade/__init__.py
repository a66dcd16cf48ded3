"""A cascade: a recogniser hears for a language model of any family, and a voice reads its text."""
