"""Fixtures that tests of several rooms share."""

import signal

import pytest

from sglang_live.stages.run_dir import RunDir

HANG_S = 20


@pytest.fixture
def run_dir():
    """A directory for Unix sockets: their paths must be short, which tmp_path's are not."""
    made = RunDir.make()
    yield made.path
    made.remove()


@pytest.fixture
def must_not_hang():
    """Ends a test that waits for what never comes."""

    def give_up(*_):
        raise TimeoutError(f"the test took longer than {HANG_S} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(HANG_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
