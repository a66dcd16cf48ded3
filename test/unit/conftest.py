"""Fixtures for tests of several rooms."""

import os
import signal

import pytest

from sglang_live.stages.run_dir import RunDir

HANG_S = 20

# One test process per core: further threads of torch would spin for cores that others use. It is
# read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def run_dir():
    """A directory for Unix sockets, whose paths must be short; paths of tmp_path are too long."""
    made = RunDir.make()
    yield made.path
    made.remove()


@pytest.fixture
def must_not_hang():
    """Fails a test that takes longer than HANG_S."""

    def fail(*_):
        raise TimeoutError(f"the test took longer than {HANG_S} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(HANG_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
