"""What a server leaves goes with it, or with the next start; what is others' stays."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sglang_live.stages.run_dir import RunDir, clear_dead, run_of
from sglang_live.stages.transport.wire import SHM_DIR, shm_names

# Makes a folder, with a file in shared memory, and waits to be killed.
OWNER = """
import sys, time
from sglang_live.stages.transport.wire import SHM_DIR, shm_names
from sglang_live.stages.run_dir import RunDir, run_of
import os
made = RunDir.make()
(made.path / "tmp" / "left").write_text("x")
(SHM_DIR / (shm_names(run_of(made.path), os.getpid()) + "loads-x")).write_text("x")
print(made.path, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def owner():
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as process:
        folder = Path(process.stdout.readline().decode().strip())
        yield process, folder, SHM_DIR / (shm_names(run_of(folder), process.pid) + "loads-x")
        process.kill()


def test_a_folder_goes_with_its_server(temporary):
    made = RunDir.make()
    assert made.path.stat().st_mode & 0o777 == 0o700
    made.remove()
    assert not list(temporary.iterdir())


def test_what_a_killed_server_left_goes_with_the_next_start(owner, temporary):
    process, folder, shared = owner
    assert clear_dead() == 0 and folder.is_dir() and shared.exists(), "it is alive"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert clear_dead() == 1
    assert not shared.exists() and not list(temporary.iterdir())


def test_all_of_a_dead_run_goes_whatever_has_its_pids_now_and_of_a_live_one_nothing(owner):
    """In containers that share the memory two servers may well have the same pids."""
    process, folder, _ = owner
    dead, alive = run_of(folder), RunDir.make()
    names = [shm_names(run, os.getpid()) + "x" for run in (dead, run_of(alive.path), dead[:-1])]
    for name in names:
        (SHM_DIR / name).write_text("x")
    try:
        process.kill()
        process.wait()
        assert clear_dead() == 1
        assert [(SHM_DIR / name).exists() for name in names] == [False, True, True]
        assert alive.path.is_dir()
        alive.remove()
        assert not (SHM_DIR / names[1]).exists(), "a stop leaves nothing either"
    finally:
        (SHM_DIR / names[2]).unlink()


def test_what_is_not_a_servers_is_left_alone(temporary):
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "owner").write_text("")
    (temporary / "sgl-live-link").symlink_to(elsewhere)
    (temporary / "sgl-live-without").mkdir()
    (temporary / "sgl-live-file").write_text("")
    (temporary / "other").mkdir()
    (temporary / "other" / "owner").write_text("")
    before = sorted(temporary.rglob("*"))
    assert clear_dead() == 0
    assert sorted(temporary.rglob("*")) == before


def test_a_folder_without_its_owners_lock_is_no_dead_servers(temporary):
    (temporary / "sgl-live-borrowed" / "tmp").mkdir(parents=True)
    assert clear_dead() == 0
    assert (temporary / "sgl-live-borrowed" / "tmp").is_dir()
