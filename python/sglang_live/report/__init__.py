"""Pictures of what was measured: one call's timeline, or the arms of a load.

`python -m sglang_live.report` is the command; it needs matplotlib (extra `bench`).
"""
