"""Speech text: a growing text in markdown is cut into pieces, and each piece becomes words.

Pure. pieces.py cuts, words.py normalises; what is said of what: docs/speech_text.md.
"""
