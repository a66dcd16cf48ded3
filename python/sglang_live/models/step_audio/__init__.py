"""Step-Audio 2 mini: one language model that hears, and writes a token of text and four codes of
speech in turns."""
