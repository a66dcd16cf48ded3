"""Fixtures that tests of several rooms share."""

import shutil

import pytest

from sglang_live.stages.supervisor import new_run_dir


@pytest.fixture
def run_dir():
    """A directory for Unix sockets: their paths must be short, which tmp_path's are not."""
    path = new_run_dir()
    yield path
    shutil.rmtree(path)
