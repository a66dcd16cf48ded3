"""scripts/mutants.py: what it changes, and which changes it says that the tests miss."""

import ast
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SOURCE = """\
LIMIT: int | None = 3


def clip(x: int | None, low: float) -> float:
    # more - or less
    return max(x, low) if x is not None and not (x < low) else low * 0.5
"""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["mutants"]


@pytest.fixture
def tree(tmp_path):
    """A repository with one room, whose tests see one side of its boundary."""
    files = {
        "python/sglang_live/__init__.py": "",
        "python/sglang_live/toy/__init__.py": "",
        "python/sglang_live/toy/adult.py": "def is_adult(age):\n    return age >= 18\n",
        "test/unit/toy/test_adult.py": (
            "from sglang_live.toy.adult import is_adult\n\n\n"
            "def test_it():\n    assert is_adult(40) and not is_adult(17)\n"
        ),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "mutants.py", tmp_path / "scripts")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def changes(script, source: str) -> set[str]:
    return {
        source[: span.start] + text + source[span.end :]
        for span in script.Sites(source).spans()
        for text in span.texts
    }


def test_operators_numbers_min_max_and_not_are_changed(script):
    line = SOURCE.splitlines()[-1]
    found = {changed.splitlines()[-1] for changed in changes(script, SOURCE)} - {line}
    assert found == {
        line.replace("max(", "min("),
        line.replace("is not None", "is None"),
        line.replace(" and ", " or "),
        line.replace("not (", "("),
        line.replace("<", "<="),
        line.replace("<", ">="),
        line.replace("*", "/"),
        line.replace("0.5", "0.525"),
        line.replace("0.5", "0.475"),
    }


def test_annotations_and_comments_are_not_changed(script):
    for changed in changes(script, SOURCE):
        assert ast.parse(changed)
        assert changed.startswith(
            ("LIMIT: int | None = 3", "LIMIT: int | None = 4", "LIMIT: int | None = 2")
        )
        assert "def clip(x: int | None, low: float)" in changed
        assert "# more - or less" in changed


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("x = (a) - (b)\n", {"x = (a) + (b)\n"}),
        ("x = (a  # - b\n  - b)\n", {"x = (a  # - b\n  + b)\n"}),
        ("x = a not  in b\n", {"x = a in b\n"}),
        ('x = "é" + a\n', {'x = "é" - a\n'}),
        ("x += ~a\n", {"x -= ~a\n", "x += a\n"}),
        ("x = 0.0\n", {"x = 1.0\n"}),
        ("x = True\n", set()),
    ],
)
def test_a_span_is_that_of_the_operator(script, source, changed):
    assert changes(script, source) == changed


def test_every_mutant_of_our_own_rooms_is_valid_python(script):
    for mutant in script.draw(["policy", "kv", "capacity"], 100, seed=0):
        assert ast.parse(mutant.applied((ROOT / mutant.file).read_text()))
        removed, added = mutant.diff.splitlines()
        assert removed[0] == "-" and added[0] == "+" and removed[1:] != added[1:]


def test_a_seed_draws_the_same_mutants_again(script):
    first = script.draw(["policy"], 20, seed=1)
    assert script.draw(["policy"], 20, seed=1) == first
    assert script.draw(["policy"], 20, seed=2) != first
    assert len(set(first)) == 20


def run(tree: Path, *args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "scripts/mutants.py", "toy", *args]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=600)


def test_boundaries_that_no_test_sees_are_reported(tree):
    done = run(tree, "--n", "9", "--json", "out.json")
    assert (done.returncode, done.stderr) == (1, "")
    result = json.loads((tree / "out.json").read_text())
    assert (result["n"], result["n_caught"]) == (4, 2)
    assert {(m["file"], m["line"], m["diff"].splitlines()[1].strip()) for m in result["lived"]} == {
        ("python/sglang_live/toy/adult.py", 2, "+    return age > 18"),
        ("python/sglang_live/toy/adult.py", 2, "+    return age >= 19"),
    }
    assert "2 of 4 caught" in done.stdout
    assert "age >= 18" in (tree / "python/sglang_live/toy/adult.py").read_text()


def test_tests_that_fail_without_a_mutant_are_an_error(tree):
    (tree / "test/unit/toy/test_adult.py").write_text("def test_it():\n    assert False\n")
    done = run(tree)
    assert done.returncode == 2
    assert "test/unit/toy/test_adult.py" in done.stderr


def test_a_mutant_that_never_ends_is_caught(tree):
    (tree / "python/sglang_live/toy/adult.py").write_text(
        "def is_adult(age):\n    while age < 18:\n        age = age + 1\n    return age\n"
    )
    (tree / "test/unit/toy/test_adult.py").write_text(
        "from sglang_live.toy.adult import is_adult\n\n\n"
        "def test_it():\n    assert is_adult(7) == 18\n    assert is_adult(18.5) == 18.5\n"
    )
    done = run(tree)
    assert (done.returncode, done.stderr) == (0, "")
    assert "7 of 7 caught" in done.stdout
