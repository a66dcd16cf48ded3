"""Moonshine tiny: speech recognition in English on a CPU."""
