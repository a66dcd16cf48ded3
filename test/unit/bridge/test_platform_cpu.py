import os
import subprocess
import sys

import pytest

from sglang_live.bridge.platform_cpu import share_cores


@pytest.mark.parametrize(("n_cores", "n_threads"), [(1, "1"), (2, "1"), (8, "2"), (64, "21")])
def test_engines_that_compute_together_share_the_cores(monkeypatch, n_cores, n_threads):
    monkeypatch.setenv("OMP_NUM_THREADS", "to be restored")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(n_cores))
    share_cores(3)
    assert os.environ["OMP_NUM_THREADS"] == n_threads


def test_what_the_user_says_stays(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    share_cores(3)
    assert os.environ["OMP_NUM_THREADS"] == "5"


def test_an_engine_computes_with_denormals_as_with_zeros():
    """Seen where it is felt: in a process that imports the engine's model runner."""
    program = (
        "import sglang_live.bridge.platform_cpu, torch;"
        "import sglang.srt.model_executor.model_runner;"
        "print((torch.full((4,), 1e-40) * 1).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["[0.0, 0.0, 0.0, 0.0]"], done.stderr
