"""Fixtures for tests of several rooms."""

import os

import pytest

from sglang_live.stages.run_dir import RunDir
from test.unit.hang_guard import ended_after

HANG_S = 120

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
def must_not_hang(request):
    """Fails a test that takes longer than HANG_S, which none does on a busy machine either."""
    with ended_after(HANG_S, request.function.__name__):
        yield
