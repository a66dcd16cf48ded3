"""Programs in a locale that knows ASCII alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import sys
from pathlib import Path
from sglang_live.utf8 import start_in_utf8_mode
start_in_utf8_mode()
path, text = sys.argv[1:]
Path(path).write_text(text, "utf-8")
"""


@pytest.mark.parametrize("utf8", ["0", ""])
def test_arguments_are_utf_8_in_the_c_locale(utf8, tmp_path):
    program, out = tmp_path / "program.py", tmp_path / "é 東京"
    program.write_text(_PROGRAM, "utf-8")
    settings = {"LC_ALL": "C", "PYTHONUTF8": utf8, "PYTHONCOERCECLOCALE": "0"}
    subprocess.run(
        [sys.executable, "-u", program, out, "Good morning 😀"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **settings},
        check=True,
    )
    assert out.read_text("utf-8") == "Good morning 😀"


def test_every_program_of_the_package_starts_in_utf_8_mode():
    package = Path(__file__).parents[2] / "python" / "sglang_live"
    started_by_others = {"stages/runtime.py", "stages/zygote.py"}  # in the server's environment
    started_by_others |= {"models/demo/build.py", "models/smollm2/convert.py"}
    for path in package.rglob("*.py"):
        text = path.read_text("utf-8")
        if "\nif __name__ ==" in text and str(path.relative_to(package)) not in started_by_others:
            assert "\n    start_in_utf8_mode()\n" in text, path
