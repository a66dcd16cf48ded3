"""Resemblyzer's speaker encoder: embeddings of voices."""
