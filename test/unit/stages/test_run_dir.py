"""What a server leaves goes with it, or with the next start; what is others' stays."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from sglang_live.stages.connectors.wire import SHM_DIR, SHM_PREFIX
from sglang_live.stages.run_dir import RunDir, clear_dead, note_process

# Makes a folder, with a file in shared memory, and waits to be killed.
OWNER = """
import sys, time
from sglang_live.stages.connectors.wire import SHM_DIR, SHM_PREFIX
from sglang_live.stages.run_dir import RunDir
import os
made = RunDir.make()
(made.path / "tmp" / "left").write_text("x")
(SHM_DIR / f"{SHM_PREFIX}{os.getpid()}-loads-x").write_text("x")
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
        yield process, folder, SHM_DIR / f"{SHM_PREFIX}{process.pid}-loads-x"
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


def test_stages_that_were_noted_are_cleared_as_well_unless_they_live(owner):
    process, folder, _ = owner
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    files = [SHM_DIR / f"{SHM_PREFIX}{pid}-x" for pid in (gone.pid, os.getpid())]
    for pid, file in zip((gone.pid, os.getpid()), files, strict=True):
        note_process(folder, pid)
        file.write_text("x")
    try:
        process.kill()
        process.wait()
        clear_dead()
        assert [file.exists() for file in files] == [False, True]
    finally:
        files[1].unlink()


def test_a_pid_that_was_given_to_another_process_keeps_no_leftover(owner):
    """What is older than the process that has the pid now is of the one before."""
    process, folder, _ = owner
    note_process(folder, os.getpid())
    old, own = (SHM_DIR / f"{SHM_PREFIX}{os.getpid()}-{name}" for name in ("old", "own"))
    try:
        for file in (old, own):
            file.write_text("x")
        before_us = psutil.Process().create_time() - 10
        os.utime(old, (before_us, before_us))
        process.kill()
        process.wait()
        clear_dead()
        assert (old.exists(), own.exists()) == (False, True)
    finally:
        for file in (old, own):
            file.unlink(missing_ok=True)


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


def test_a_note_that_cannot_be_written_costs_nothing_else(temporary, caplog):
    note_process(temporary / "absent", 1)
    assert "process_not_noted" in caplog.text


def test_a_note_makes_no_folder_look_like_a_dead_servers(temporary):
    """Without an owner's lock the next start would remove it under those who use it."""
    (temporary / "sgl-live-borrowed").mkdir()
    note_process(temporary / "sgl-live-borrowed", os.getpid())
    assert clear_dead() == 0
    assert (temporary / "sgl-live-borrowed").is_dir()
