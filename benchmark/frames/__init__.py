"""Workload W6: calls in frame mode, whose audio never ends."""
