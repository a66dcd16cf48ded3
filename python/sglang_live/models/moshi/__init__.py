"""Moshi and PersonaPlex: a language model that hears and speaks at the same time."""
