"""Fit of the numbers that end users' turns (interaction/turn_end.py); docs/turn_taking.md has its
method and results.
"""
