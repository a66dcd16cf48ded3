"""Claims about the repository's own layout, requirements and scripts."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
REQUIREMENTS = sorted((ROOT / "requirements").glob("*.txt"))
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]


def requirement_lines(path: Path) -> list[str]:
    """Without markers of machines."""
    lines = path.read_text().splitlines()
    return [line.partition(" ; ")[0] for line in lines if line and not line.startswith("#")]


def test_the_kernels_folder_is_no_package():
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


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_are_executable(path):
    subprocess.run(["bash", "-n", path], check=True)
    assert path.stat().st_mode & 0o111


@pytest.mark.parametrize("script", ["setup.sh", "demo.sh"])
def test_an_unknown_option_exits_with_2_before_any_step(script):
    command = ["bash", ROOT / "scripts" / script, "--no-such-option"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "unknown option" in done.stderr


# --- requirements/locked/: what scripts/setup.sh installs ---

LOCKED = sorted((ROOT / "requirements" / "locked").glob("*.txt"))
SETUP = (ROOT / "scripts" / "setup.sh").read_text()


def locked(path: Path) -> dict[str, tuple[str, int]]:
    """Version and number of hashes of each package in a locked list."""
    blocks = re.split(r"\n(?=\S)", path.read_text().strip())
    packages = {}
    for block in blocks:
        name, version = re.match(r"([a-z0-9-]+)==([^\s;]+)", block).groups()
        packages[name] = (version, len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", block)))
    return packages


@pytest.mark.parametrize("path", LOCKED, ids=lambda path: path.name)
def test_every_locked_package_has_hashes_and_no_address(path):
    assert all(n_hashes for _, n_hashes in locked(path).values())
    assert "://" not in path.read_text()


@pytest.mark.parametrize(
    "name", ["cpu", "cpu_no_deps", "test", "bench", "training", "cluster", "release"]
)
def test_a_locked_list_has_the_pins_of_its_requirements(name):
    lines = requirement_lines(ROOT / "requirements" / f"{name}.txt")
    pins = dict(line.split("==") for line in lines)
    pins.pop("torch", None)  # by version alone: its CPU builds differ by index
    versions = {
        package: version
        for package, (version, _) in locked(
            ROOT / "requirements" / "locked" / f"{name}.txt"
        ).items()
    }
    assert versions == pins


def test_the_clients_are_locked_in_the_versions_that_the_examples_name():
    lines = requirement_lines(ROOT / "docs" / "examples" / "requirements.txt")
    packages = locked(ROOT / "requirements" / "locked" / "clients.txt")
    pins = dict(re.sub(r"\[.*\]", "", line).split("==") for line in lines)
    assert {name: packages[name][0] for name in pins} == pins


def test_the_setup_for_the_cpu_installs_packages_by_hash_and_runs_no_npm_script():
    assert SETUP.count("--no-deps --require-hashes") == 3  # .venv, .venv-clients, .venv-cluster
    for name in ("cpu", "cpu_no_deps", "test", "bench", "training"):
        assert re.search(rf"^ +install_locked {name}$", SETUP, re.MULTILINE)
    assert "npm ci" in SETUP and "--ignore-scripts" in SETUP and "npm install" not in SETUP


def test_the_gateway_requires_a_starlette_that_ignores_the_host_header_in_paths():
    assert '"starlette>=1.10"' in (ROOT / "setup.py").read_text()
    pins = requirement_lines(ROOT / "requirements" / "cuda.txt")
    assert any(line.startswith("starlette==") for line in pins)
    assert set(pins) <= {
        line
        for name in ("cpu.txt", "cpu_no_deps.txt")
        for line in requirement_lines(ROOT / "requirements" / name)
    }
