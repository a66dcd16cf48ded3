"""Claims about the justfile and the hooks that run before a commit."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
JUSTFILE = (ROOT / "justfile").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
_RECIPE = re.compile(
    r"^(?P<note># .*\n)?(?P<name>[a-z][a-z0-9]*)(?: [^:\n]*)?:(?P<rest>.*\n(?:    .*\n)*)", re.M
)
_MAX_BYTES = 2 << 20


def recipes() -> dict[str, re.Match]:
    return {m["name"]: m for m in _RECIPE.finditer(JUSTFILE) if not m["rest"].startswith("=")}


def hook(name: str) -> dict:
    [found] = [hook for repo in HOOKS for hook in repo["hooks"] if hook["id"] == name]
    return found


def test_the_usual_recipes_exist():
    usual = {"setup", "fmt", "lint", "types", "unit", "engine", "e2e", "fast", "all", "demo"}
    assert usual | {"mutants", "seams"} <= recipes().keys()


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_has_a_comment_and_at_most_one_command(name):
    recipe = recipes()[name]
    assert recipe["note"]
    assert recipe["rest"].count("\n    ") <= 1


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_names_only_what_exists(name):
    rest = recipes()[name]["rest"]
    files = re.findall(r"(?<![\w./])(?:scripts|test|benchmark)/[\w./-]+", rest)
    modules = [m.replace(".", "/") + ".py" for m in re.findall(r"-m (benchmark[\w.]*)", rest)]
    assert [path for path in files + modules if not (ROOT / path).exists()] == []


def test_recipes_in_contributing_exist():
    named = re.findall(r"`just ([a-z][a-z0-9]*)", CONTRIBUTING)
    assert named and [name for name in named if name not in recipes()] == []


def test_hooks_run_the_tools_of_the_environment_and_download_nothing():
    assert {repo["repo"] for repo in HOOKS} == {"local"}
    assert all(hook["language"] == "system" for repo in HOOKS for hook in repo["hooks"])
    for name in ("ruff", "ruff-format", "mypy"):
        assert hook(name)["entry"].startswith(".venv/bin/")


def large_files(*paths: str) -> subprocess.CompletedProcess:
    large = hook("large-files")
    command = ["bash", "-c", f'{large["entry"]} {" ".join(large["args"])} "$@"', "_", *paths]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_the_hook_refuses_a_file_over_the_limit(tmp_path):
    small, large = tmp_path / "small file", tmp_path / "large file"
    small.write_bytes(bytes(_MAX_BYTES))
    large.write_bytes(bytes(_MAX_BYTES + 1))
    assert large_files(str(small)).returncode == 0
    refused = large_files(str(small), str(large))
    assert (refused.returncode, refused.stdout) == (1, f"{large}\n")


def test_no_tracked_file_is_over_the_limit_but_the_excepted():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    excepted = re.compile(hook("large-files")["exclude"])
    paths = [ROOT / name for name in listed.stdout.splitlines() if not excepted.search(name)]
    assert [str(p) for p in paths if p.is_file() and p.stat().st_size > _MAX_BYTES] == []
