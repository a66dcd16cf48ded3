"""Skips tests marked `gpu` without a CUDA device; hypothesis has no deadline.

Tests run on uvloop, like the server and SGLang.
"""

import atexit
import gc
import shutil
import subprocess

import pytest
import uvloop
from hypothesis import settings

# The duration of an example depends on the machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def _has_gpu() -> bool:
    # The driver is queried, because importing torch would slow every unit test run.
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    return "GPU" in listed.stdout


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    # Imported modules and collected tests stay: looking for garbage among them takes seconds.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # nanobind reports what is left at the exit


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}


def pytest_collection_modifyitems(items):
    marked = [item for item in items if "gpu" in item.keywords]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
