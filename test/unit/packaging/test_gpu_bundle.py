"""The folder of wheels for a machine without a network (scripts/gpu_bundle.sh)."""

import csv
import io
import subprocess
import zipfile
from pathlib import Path

import pytest

from scripts import bundle_wheels as bundle

ROOT = Path(__file__).parents[3]


def wheel(folder: Path, name: str, *requirements: str, files: dict[str, str] | None = None) -> Path:
    """A wheel `NAME-1.0-py3-none-any.whl` with a right RECORD."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
    lines += [f"Requires-Dist: {one}" for one in requirements]
    content = {f"{info}/METADATA": "\n".join(lines) + "\n", **(files or {})}
    record = io.StringIO()
    rows = [(n, bundle._digest(text.encode()), len(text)) for n, text in content.items()]
    csv.writer(record, lineterminator="\n").writerows([*rows, (f"{info}/RECORD", "", "")])
    with zipfile.ZipFile(path, "w") as new:
        for name_in, text in {**content, f"{info}/RECORD": record.getvalue()}.items():
            new.writestr(name_in, text)
    return path


def pinned(file_name: str) -> set[str]:
    lines = (ROOT / "requirements" / file_name).read_text().splitlines()
    return {
        bundle.canonicalize_name(line.partition("==")[0])
        for line in lines
        if line and not line.startswith("#")
    }


def test_every_package_of_the_server_is_in_the_folder_or_on_the_machine():
    in_folder = [
        bundle.canonicalize_name(entry.partition("==")[0]) for entry in bundle.missing_packages()
    ]
    there = {*in_folder, *bundle.base_packages(), *bundle.LEFT_OUT}
    assert pinned("cpu.txt") | pinned("cpu_no_deps.txt") <= there
    assert len(set(in_folder)) == len(in_folder)
    assert {"sglang", "silero-vad", "pydantic-core"} <= set(in_folder)


def test_every_package_of_the_folder_is_pinned_with_hashes():
    assert all("--hash=sha256:" in entry for entry in bundle.missing_packages())


def test_the_machine_has_no_package_twice_and_none_of_sglangs_kernels():
    base = bundle.base_packages()
    assert base["torch"] == "2.11.0"
    assert not {"sglang", "sglang-kernel", "flashinfer-python"} & set(base)


@pytest.mark.parametrize(
    ("requirement", "fault"),
    [
        ("other", None),
        ("torch>=2.11", None),
        ("absent; python_version < '3.12'", None),
        ("absent; extra == 'all'", None),
        ("absent", "in neither list"),
        ("absent; python_version >= '3.12'", "in neither list"),
        ("torch==2.13.0", "2.11.0 is there"),
        ("other>1", "1.0 is there"),
    ],
)
def test_a_requirement_that_is_not_met_is_found(tmp_path, requirement, fault):
    wheel(tmp_path, "one", requirement)
    wheel(tmp_path, "other")
    faults = list(bundle.unmet(tmp_path, "3.12"))
    assert len(faults) == (fault is not None)
    assert all(fault in line and line.startswith("one requires") for line in faults)


@pytest.mark.parametrize(
    ("tag", "fits"),
    [
        ("py3-none-any", True),
        ("cp312-cp312-manylinux_2_28_x86_64", True),
        ("cp310-abi3-manylinux2014_x86_64", True),
        ("cp311-cp311-manylinux_2_28_x86_64", False),
        ("cp313-abi3-manylinux_2_28_x86_64", False),
        ("cp312-cp312-manylinux_2_28_aarch64", False),
        ("py2-none-any", False),
    ],
)
def test_wheels_for_another_machine_are_found(tag, fits):
    assert bundle._fits(tag, "3.12") == fits


def test_a_wheel_without_its_unread_files_is_still_a_wheel(tmp_path):
    files = {"jedi/__init__.py": "x = 1\n", "jedi/third_party/stub.pyi": "y: int\n"}
    path = wheel(tmp_path, "jedi", files=files)
    bundle.slim(path)
    with zipfile.ZipFile(path) as small:
        assert "jedi/__init__.py" in small.namelist()
        assert not [name for name in small.namelist() if "third_party" in name]
    assert list(bundle.broken_records(tmp_path)) == []
    assert [path.name for path in tmp_path.iterdir()] == ["jedi-1.0-py3-none-any.whl"]


def test_a_wheel_that_was_damaged_is_found(tmp_path):
    path = wheel(tmp_path, "one", files={"one.py": "x = 1\n"})
    with zipfile.ZipFile(path) as old:
        content = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, data in content.items():
            new.writestr(name, b"x = 2\n" if name == "one.py" else data)
    (fault,) = bundle.broken_records(tmp_path)
    assert fault.endswith("one.py has another hash")


@pytest.mark.parametrize("words", [[], ["--python", "3.13", "x"], ["--python"], ["a", "b"], ["-x"]])
def test_wrong_arguments_are_refused(words, tmp_path):
    done = subprocess.run(
        ["bash", ROOT / "scripts/gpu_bundle.sh", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "usage: scripts/gpu_bundle.sh" in done.stderr


def test_a_folder_that_exists_is_not_overwritten(tmp_path):
    done = subprocess.run(
        ["bash", ROOT / "scripts/gpu_bundle.sh", tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "remove it, or name another folder" in done.stderr
