import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_live.bridge import platform_cpu
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


def test_where_a_model_runs_denormals_are_zeros_and_messages_go_first():
    """In a process of its own: the rest of the tests is an elsewhere."""
    program = """
import os, torch, sglang.srt.model_executor.model_runner
from sglang_live.bridge.platform_cpu import begin_computing_and
tiny = torch.full((4,), 1e-40)
def state(): return (tiny * 1).count_nonzero().item(), os.nice(0)
print(*state())
begin_computing_and(lambda runner: print(runner, *state()), "a runner")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    elsewhere, here = done.stdout.splitlines()[-2:]
    n_tiny, nice = map(int, elsewhere.split())
    assert n_tiny == 4, done.stderr
    assert here == f"a runner 0 {min(nice + 5, 19)}"


@pytest.mark.parametrize("leads_a_session", [True, False])
def test_who_leads_a_session_is_nice_with_all_of_it(leads_a_session):
    program = """
from pathlib import Path
from sglang_live.bridge.platform_cpu import be_nice
import os
group = Path("/proc/self/autogroup")
was = os.nice(0)
be_nice(7)
print(os.nice(0) - was, group.read_text().split()[-1] if group.exists() else "none")
"""
    group = Path("/proc/self/autogroup")
    before = group.read_text().split()[-1] if group.exists() else "none"
    # Not a leader: this would be the session of whoever runs the tests.
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, start_new_session=leads_a_session,
    )  # fmt: skip
    own, of_group = done.stdout.split()
    assert own == "7", done.stderr
    assert of_group == ("7" if leads_a_session and before != "none" else before)


class FakeGroup:
    """A session's group that is set only when `refusals` have run out."""

    def __init__(self, *refusals: OSError):
        self.refusals, self.nice = list(refusals), 0

    def exists(self) -> bool:
        return True

    def write_text(self, text: str) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        self.nice = int(text)


@pytest.mark.parametrize(
    ("refusals", "nice", "warned"),
    [
        ([BlockingIOError()] * 3, 4, ""),
        ([BlockingIOError()] * 99, 0, "others were always first"),
        ([PermissionError("no proc")], 0, "no proc"),
    ],
)
def test_a_group_that_cannot_be_set_is_said_and_does_no_harm(
    monkeypatch, caplog, refusals, nice, warned
):
    group = FakeGroup(*refusals)
    monkeypatch.setattr(platform_cpu, "_AUTOGROUP", group)
    monkeypatch.setattr(platform_cpu.time, "sleep", lambda s: None)
    monkeypatch.setattr(os, "nice", lambda n: n)
    monkeypatch.setattr(os, "getsid", lambda pid: os.getpid())
    platform_cpu.be_nice(4)
    assert group.nice == nice
    assert warned in caplog.text
    assert bool(caplog.text) == bool(warned)
