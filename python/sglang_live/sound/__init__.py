"""Decoding of untrusted sound files within bounds. Imports nothing of the server."""
