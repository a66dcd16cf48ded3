"""scripts/release.sh refuses what it cannot do. A release is built in test/e2e/test_release.py."""

import re
import subprocess
from pathlib import Path

import pytest

from test.unit.packaging.test_check_install import CHECK

SCRIPT = Path(__file__).parents[3] / "scripts" / "release.sh"


def release(*words: str | Path, folder: Path) -> subprocess.CompletedProcess:
    command = ["bash", SCRIPT, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("words", [[], ["--here"], ["a", "b"], ["--there", "a"], ["-x"]])
def test_wrong_arguments_are_refused(words, tmp_path):
    done = release(*words, folder=tmp_path)
    assert done.returncode == 2
    assert "usage: scripts/release.sh" in done.stderr


def test_a_folder_that_exists_is_not_overwritten(tmp_path):
    done = release("--here", tmp_path, folder=tmp_path)
    assert done.returncode == 2
    assert "remove it, or name another folder" in done.stderr


def test_sglang_is_there_for_every_python_and_machine_whose_set_up_is_resolved():
    text = SCRIPT.read_text()
    for name in ("PYTHONS", "MACHINES"):
        [words] = re.findall(rf"^{name}=\((.*)\)$", text, re.MULTILINE)
        assert tuple(words.split()) == getattr(CHECK, name)
