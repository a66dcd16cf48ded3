"""Claims about the repository's own layout, requirements and scripts."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
REQUIREMENTS = sorted((ROOT / "requirements").glob("*.txt"))
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]


def requirement_lines(path: Path) -> list[str]:
    lines = path.read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_the_kernels_folder_cannot_be_taken_for_the_package_of_that_name():
    assert not (ROOT / "kernels" / "__init__.py").exists(), (
        "see python/sglang_live/kernels/__init__.py"
    )


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.name)
def test_every_requirement_is_pinned_once(path):
    lines = requirement_lines(path)
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+", line) for line in lines)
    names = [line.partition("==")[0] for line in lines]
    assert len(names) == len(set(names))


def test_lists_that_name_the_same_package_agree_on_its_version():
    pins: dict[str, set[str]] = {}
    for path in REQUIREMENTS:
        for line in requirement_lines(path):
            name, _, version = line.partition("==")
            pins.setdefault(name, set()).add(version)
    assert {name: versions for name, versions in pins.items() if len(versions) > 1} == {}


def test_both_devices_get_the_same_sglang():
    in_setup = re.search(r'^SGLANG = "(.+)"', (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert in_setup.group(1) in requirement_lines(ROOT / "requirements" / "cpu_no_deps.txt")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_are_executable(path):
    subprocess.run(["bash", "-n", path], check=True)
    assert path.stat().st_mode & 0o111


@pytest.mark.parametrize("script", ["setup.sh", "demo.sh"])
def test_an_unknown_option_is_exit_code_2_before_anything_happens(script):
    command = ["bash", ROOT / "scripts" / script, "--no-such-option"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "unknown option" in done.stderr
