"""Fixtures that tests of several rooms share."""

import shutil
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def run_dir():
    """A directory for Unix sockets: their paths must be short, which tmp_path's are not."""
    path = Path(tempfile.mkdtemp(prefix="sgl-live-"))
    yield path
    shutil.rmtree(path)
