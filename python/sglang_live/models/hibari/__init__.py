"""hibari: text to speech in English on a CPU."""
