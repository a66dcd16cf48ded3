"""scripts/check_install.py resolves what users install, and says why it could not."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "check_install.py"


def _script():
    spec = importlib.util.spec_from_file_location("check_install", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_install"] = module  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


CHECK = _script()


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    return list(CHECK.resolutions(tmp_path_factory.mktemp("scratch")))


def test_each_set_up_is_resolved_for_every_python_and_machine(wanted):
    of_platform: dict[tuple[str, str], set[str]] = {}
    for resolution in wanted:
        of_platform.setdefault((resolution.python, resolution.machine), set()).add(resolution.title)
    assert len(of_platform) == 4
    assert all(titles == set.union(*of_platform.values()) for titles in of_platform.values())
    titles = " ".join(set.union(*of_platform.values()))
    assert ".[cpu," in titles and ".[cuda," in titles and "torch's CPU build" in titles
    for path in (ROOT / "requirements" / "locked").glob("*.txt"):
        assert re.search(rf"\b{path.stem}\b", titles)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "deploy").glob("Dockerfile.*")), ids=lambda p: p.name
)
def test_the_set_up_of_an_image_is_among_them(path):
    text = path.read_text("utf-8")
    assert set(re.findall(r"python:?(3\.\d+)", text)) <= set(CHECK.PYTHONS)
    assert set(re.findall(r"setup\.sh --device (\w+)", text)) <= set(CHECK.DEVICES)


def test_pip_settings_of_this_machine_do_not_count(wanted, monkeypatch):
    seen = {}

    def run(command, **options):
        seen.update(options["env"])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    monkeypatch.setenv("UV_INDEX", "file:///other")
    monkeypatch.setattr(subprocess, "run", run)
    assert CHECK.resolve(wanted[0], float("inf")) == ""
    assert "PATH" in seen and not seen.keys() & {"PIP_FIND_LINKS", "UV_INDEX"}


def test_an_index_out_of_reach_is_told_in_the_last_line(wanted, capsys):
    faults = ["", "error: Failed to fetch\n  cause: error sending request\n  cause: dns error"]
    last = CHECK.report(wanted[:2], faults)
    assert last.startswith("NOT CHECKED: the public package index cannot be reached")


def test_a_conflict_is_told_with_its_set_up(wanted, capsys):
    last = CHECK.report(wanted[:2], ["", "error: No solution found"])
    assert last.startswith("1 of 2 set-ups cannot be installed")
    assert f"FAILED Python {wanted[1].python} {wanted[1].machine}" in capsys.readouterr().out


def test_packages_beside_the_locked_ones_are_a_fault():
    output = "nvidia-cublas==13.1\ntorch==2.13.0\nsympy==1.14.0\nnew-one==1"
    assert CHECK.unlocked(output, frozenset({"torch", "sympy"})) == ["new-one"]
