"""Containers without a user's home, and locales without UTF-8."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_live import preflight
from sglang_live.arguments import parse
from sglang_live.environment import CACHE_ENV, cache_directory, check_cache_folder, provide_home
from sglang_live.errors import BadInputError, LiveError
from sglang_live.models.checkpoint_files import find_checkpoint
from sglang_live.models.demo.location import TRAINED, is_demo
from sglang_live.models.speech_kinds import find_voice
from sglang_live.stages.run_dir import clear_dead

_PROGRAM = """
import sys
from pathlib import Path
from sglang_live.environment import start_in_utf8_mode
start_in_utf8_mode()
path, text = sys.argv[1:]
Path(path).write_text(text, "utf-8")
"""


@pytest.fixture
def homeless(monkeypatch):
    """An account without an entry in passwd and without HOME."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv(CACHE_ENV, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)


def test_a_given_cache_folder_needs_no_home(homeless, monkeypatch):
    assert parse(["--model-path", "demo", "--cache-dir", "/c"]).folders.cache_dir == Path("/c")
    monkeypatch.setenv(CACHE_ENV, "/of/environment")
    assert parse(["--model-path", "demo"]).folders.cache_dir == Path("/of/environment")
    assert is_demo(str(TRAINED)) and not is_demo("/elsewhere")


def test_without_a_home_the_flag_to_set_is_named(homeless):
    with pytest.raises(BadInputError, match=r"--cache-dir: .* no home.*SGLANG_LIVE_CACHE"):
        parse(["--model-path", "demo"])


def test_a_path_below_an_unknown_home_is_a_path_that_is_missing(homeless):
    with pytest.raises(BadInputError, match="~/voice"):
        find_voice("~/voice")
    with pytest.raises(BadInputError, match="~/model"):
        find_checkpoint("~/model", ())


def test_the_default_is_below_the_home(monkeypatch):
    monkeypatch.delenv(CACHE_ENV, raising=False)
    monkeypatch.setenv("HOME", "/home/of/user")
    assert cache_directory() == Path("/home/of/user/.cache/sglang_live")


def test_a_cache_folder_that_cannot_be_written_is_named_with_its_flag(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BadInputError, match=r"--cache-dir: cannot write .*file/below.*this flag"):
        check_cache_folder(tmp_path / "file" / "below")
    check_cache_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize("what", ["absent", "a file", "with a file for its caches"])
def test_libraries_get_a_home_in_the_cache_folder_where_the_users_is_no_use(
    what, tmp_path, monkeypatch
):
    home = tmp_path / "home of user"
    if what == "a file":
        home.touch()
    elif what != "absent":
        home.mkdir()
        (home / ".cache").touch()
    monkeypatch.setenv("HOME", str(home))
    provide_home(tmp_path / "cache")
    assert os.environ["HOME"] == str(tmp_path / "cache" / "home")
    assert (tmp_path / "cache" / "home").is_dir()


def test_a_home_that_can_be_written_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    provide_home(tmp_path / "cache")
    assert os.environ["HOME"] == str(tmp_path) and not (tmp_path / "cache").exists()


def test_without_any_temporary_folder_the_variable_to_set_is_named(monkeypatch):
    def none():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", none)
    clear_dead()
    with pytest.raises(LiveError, match=r"no folder for temporary files: .*: set TMPDIR"):
        preflight.check_temporary_folder()


def test_a_home_is_looked_for_in_one_place():
    package = Path(__file__).parents[2] / "python" / "sglang_live"
    # A user types these paths, and `~` in them stays as it is where there is no home.
    typed = {"speech_kinds.py", "composition.py", "checkpoint_files.py"}
    looks = re.compile(r"Path\.home\(|expanduser\(|\bgetpass\b|getpwuid")
    found = {path for path in package.rglob("*.py") if looks.search(path.read_text("utf-8"))}
    allowed = {package / "environment.py", *(package / "models" / name for name in typed)}
    assert found == allowed


# --- UTF-8 ---


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
    # In the server's environment.
    started_by_others = {"stages/runtime.py", "stages/zygote.py", "sound/media_host.py"}
    started_by_others |= {"webrtc/host.py", "models/demo/build.py", "models/smollm2/convert.py"}
    for path in package.rglob("*.py"):
        text = path.read_text("utf-8")
        if "\nif __name__ ==" in text and str(path.relative_to(package)) not in started_by_others:
            assert "\n    start_in_utf8_mode()\n" in text, path
