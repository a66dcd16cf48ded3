"""Zonos v0.1: a guided transformer that writes the nine books of DAC with a delay."""
