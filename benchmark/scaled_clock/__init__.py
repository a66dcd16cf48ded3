"""Clocks slower than real time, for more load than the machine carries in real time."""

import os

SCALED_CLOCK_ENV = "SCALED_CLOCK"


def clock_divisor() -> int:
    """Real seconds per second of this process's clocks; 1 if they are not scaled."""
    return int(os.environ.get(SCALED_CLOCK_ENV, "1").partition(":")[0])
