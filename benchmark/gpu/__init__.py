"""Checks of the parts that run on a GPU against the CPU, and what they cost there."""
