"""A release, installed from its folder alone, serves without the repository."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from sglang_live import __version__
from test.e2e.conftest import START_TIMEOUT_S, running_server

pytestmark = [pytest.mark.e2e]

ROOT = Path(__file__).parents[2]
# What an installation from the release must bring; the rest of the CPU set-up is there already.
BROUGHT = ("sglang", "pipecat", "__editable__", "zz_sglang_live")


def run(*command: str | Path, folder: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(python: Path, *arguments: str | Path, folder: Path) -> str:
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index"]
    return run(*command, "--disable-pip-version-check", *arguments, folder=folder)


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("release") / "dist"
    script = ROOT / "scripts" / "release.sh"
    run("env", f"PYTHON={sys.executable}", "bash", script, "--here", folder, folder=ROOT)
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """The interpreter of a fresh environment, which sees what no release brings."""
    folder = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", folder=folder)
    (there := folder / "there").mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(BROUGHT):
            (there / entry.name).symlink_to(entry)
    [site] = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "there.pth").write_text(f"{there}\n")
    return folder / "venv" / "bin" / "python"


def test_every_file_of_a_release_has_its_checksum(release):
    checked = run("sha256sum", "--check", "--strict", "SHA256SUMS", folder=release)
    names = {path.name for path in release.iterdir()} - {"SHA256SUMS"}
    assert {line.removesuffix(": OK") for line in checked.splitlines()} == names
    assert f"sglang_live-{__version__}.tar.gz" in names


def test_the_bill_of_materials_has_every_package_of_the_cpu_set_up_by_hash(release):
    bill = json.loads((release / "sbom.cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    found = {part["name"]: part for part in bill["components"]}
    locked = (ROOT / "requirements" / "locked" / "cpu.txt").read_text()
    pins = dict(line.split()[0].split("==") for line in locked.splitlines() if "==" in line)
    assert {name: found[name]["version"] for name in pins} == pins
    assert {"torch", "sglang", "sglang-live"} <= found.keys()
    with_hashes = {
        name
        for name, part in found.items()
        if any(reference.get("hashes") for reference in part.get("externalReferences", ()))
    }
    assert found.keys() - with_hashes == {"torch"}


def test_the_source_of_a_release_builds_its_wheel(release, python, tmp_path):
    [source] = release.glob("sglang_live-*.tar.gz")
    [wheel] = release.glob("sglang_live-*.whl")
    options = ("--no-deps", "--no-build-isolation", "--no-compile", "--target", tmp_path)
    pip(python, *options, source, folder=tmp_path)
    built = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} <= built
    assert "sglang_live/sgl_patches/kv_copy.py" in names


def test_an_installed_release_holds_a_spoken_conversation(release, python, tmp_path):
    links = ("--no-compile", "--find-links", release)
    pip(python, *links, "sglang-live[cpu]", folder=tmp_path)
    where = "from importlib.util import find_spec as f; "
    where += "print(*(f(name).origin for name in ('sglang', 'sglang_live', 'pipecat')))"
    found = run(python, "-c", where, folder=tmp_path).split()
    assert all(Path(path).is_relative_to(python.parents[1]) for path in found)
    program = str(python.with_name("sglang-live"))
    assert run(program, "--version", folder=tmp_path) == f"{__version__}\n"
    # Its modules are compiled at their first import.
    more_s = 2 * START_TIMEOUT_S
    alone = {"environment": {"PYTHONPATH": ""}, "folder": tmp_path, "start_timeout_s": more_s}
    with running_server("demo", tmp_path, **alone, program=(program, "serve")) as server:
        spoken = run(program, "talk", "--url", server.ws, "--json", folder=tmp_path)
    turn = json.loads(spoken.splitlines()[-1])
    assert turn["status"] == "completed" and turn["transcript"] and turn["audio_s"] > 0.5
