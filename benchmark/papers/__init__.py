"""Experiments of the papers on a simulated server; see benchmark/notes/papers.md."""
