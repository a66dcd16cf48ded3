"""Experiments of the papers on a simulated server, and their pictures: docs/papers.md."""
