"""A set-up tells its sizes first, and after a failure what to do."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# An interpreter whose pip offers $OFFERED and fails with $SAYS.
_INTERPRETER = """#!/bin/bash
case "$*" in
*"-m venv "*) mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python" ;;
*"-m pip index"*) echo "Available versions: $OFFERED" ;;
*"-m pip install"*) echo "$SAYS" >&2; exit 1 ;;
*sysconfig*) echo /nonexistent ;;
esac
"""
_PUBLISHED, _CPU_BUILD = "2.15.0, 2.13.0, 2.12.1", "2.15.0, 2.13.0+cpu, 2.13.0"


def set_up(folder: Path, offered: str = _CPU_BUILD, **environment: str) -> list[str]:
    """The lines that a set-up prints that fails at its first package."""
    for name, text in (("python", _INTERPRETER), ("df", environment.pop("df", "exec /bin/df $@"))):
        (folder / name).write_text(text if text[0] == "#" else f"#!/bin/bash\n{text}\n", "utf-8")
        (folder / name).chmod(0o755)
    done = subprocess.run(
        ["bash", ROOT / "scripts/setup.sh", "--device", "cpu", "--venv", folder / "venv"],
        env={
            "PATH": f"{folder}:/usr/bin:/bin",
            "PYTHON": str(folder / "python"),
            "OFFERED": offered,
            "SAYS": "ERROR: ResolutionImpossible",
        }
        | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )
    assert done.returncode == 1
    return done.stdout.splitlines()


def test_the_last_line_of_a_failed_set_up_says_what_to_do(tmp_path):
    lines = set_up(tmp_path)
    assert lines[-2].startswith("--- set-up failed in step 'sglang'")
    assert lines[-1].startswith("to do: settings of your pip ask for other versions")


def test_without_a_python_the_last_line_asks_for_one(tmp_path):
    lines = set_up(tmp_path, PYTHON="/nonexistent/python3.12")
    assert lines[-1].startswith("to do: install Python 3.11 or 3.12")


def test_sizes_are_told_before_the_first_download(tmp_path):
    lines = set_up(tmp_path)
    [at] = [i for i, line in enumerate(lines) if line.startswith("needs ")]
    assert "of downloads" in lines[at] and "of disk" in lines[at]
    assert at < next(i for i, line in enumerate(lines) if line.startswith("[2/"))
    assert not any("PIP_EXTRA_INDEX_URL" in line for line in lines)


def test_the_smaller_build_is_offered_where_the_index_lacks_it(tmp_path):
    lines = set_up(tmp_path, offered=_PUBLISHED)
    assert any("PIP_EXTRA_INDEX_URL" in line for line in lines)
    [needs] = [line for line in lines if line.startswith("needs ")]
    (tmp_path / "other").mkdir()
    [less] = [line for line in set_up(tmp_path / "other") if line.startswith("needs ")]
    assert float(needs.split()[1]) > 2 + float(less.split()[1])


def test_a_disk_without_room_ends_the_set_up_before_a_download(tmp_path):
    lines = set_up(tmp_path, df='echo; echo "disk 9 9 900 9% /"')
    assert lines[-1].startswith("to do: free disk space")
    assert not any(line.startswith("[2/") for line in lines)


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("The virtual environment was not created: ensurepip is not available", "python3-venv"),
        ("OSError: [Errno 28] No space left on device", "free disk space"),
        ("mkdir: cannot create directory: Permission denied", "writable"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", "pip config list"),
        ("ERROR: Cannot install torch because of conflicting dependencies", "pip config list"),
        ("SSLError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]')\nERROR: No matching dist", "PIP_CERT"),
        (
            "NewConnectionError: Temporary failure in name resolution\n"
            "ERROR: No matching distribution found for sglang==0.5.23",
            "PIP_INDEX_URL",
        ),
        ("ERROR: No matching distribution found for sglang==0.5.23", "glibc 2.34"),
        ("setup.sh: line 1: sudo: command not found", "as root, install Chromium"),
        ("setup.sh: line 1: apt-get: command not found", "as root, install Chromium"),
        ("setup.sh: line 1: npm: command not found", "Node.js"),
        ("npm error code ENOTFOUND", "npm config set registry"),
        ("ERROR: Failed building wheel for pocketsphinx", "C compiler"),
        ("a fault that no one has seen", "the lines above"),
    ],
)
def test_each_usual_reason_has_an_advice_of_its_own(said, advice, tmp_path):
    command = '. scripts/setup_advice.sh; VENV=$1; advice <(echo "$2") 1'
    done = subprocess.run(
        ["bash", "-c", command, "_", tmp_path / "venv", said],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
    )
    assert advice in done.stdout and done.stdout.count("\n") == 1
