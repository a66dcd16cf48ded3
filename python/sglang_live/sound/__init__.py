"""Sound files of any sender, decoded within bounds. Imports nothing of the server."""
