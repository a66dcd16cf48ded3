"""Threads of recognisers and voices, which run beside the engine on the same processor."""

import os


def computing_threads() -> int:
    """For one call: half of the cores, at most 4. More gain little in networks of this size."""
    return min(4, max(1, (os.cpu_count() or 1) // 2))
