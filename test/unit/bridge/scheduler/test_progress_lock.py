"""tqdm leaves nothing in shared memory when a process is killed."""

import subprocess
import sys

import pytest

SCRIPT = """
import multiprocessing, sys
multiprocessing.set_start_method("spawn")  # as SGLang does
from tqdm import tqdm
from sglang_live.bridge.scheduler.progress_lock import forgo_progress_lock
if sys.argv[1] == "without":
    forgo_progress_lock()
assert list(tqdm([1, 2])) == [1, 2]
print([n for n in open("/proc/self/maps").read().split() if n.startswith("/dev/shm/sem.")])
"""


@pytest.mark.parametrize(("lock", "leaves"), [("with", True), ("without", False)])
def test_progress_leaves_nothing_in_shared_memory(lock, leaves):
    run = subprocess.run([sys.executable, "-c", SCRIPT, lock], capture_output=True, check=True)
    assert (run.stdout.strip() != b"[]") == leaves
