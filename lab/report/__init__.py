"""Figures of measurements: the timeline of one session, or the arms of a benchmark.

`python -m lab.report` is the command; it needs matplotlib (extra `bench`).
"""
