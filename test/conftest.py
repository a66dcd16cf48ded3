"""Tests marked `gpu` are skipped where there is no CUDA device; no example is timed.

Tests run on uvloop, as the server and SGLang do.
"""

import shutil
import subprocess

import pytest
import uvloop
from hypothesis import settings

# How long an example takes is the machine's business.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def _has_gpu() -> bool:
    # Asked of the driver, not of torch: importing that would slow every unit test run.
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    return "GPU" in listed.stdout


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}


def pytest_collection_modifyitems(items):
    marked = [item for item in items if "gpu" in item.keywords]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
