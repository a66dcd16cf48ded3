"""`sglang-live COMMAND`: short names of programs that `python -m` runs as well."""

import os
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from sglang_live import __main__ as main
from sglang_live import __version__

PACKAGE = Path(main.__file__).parent


def run(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["sglang-live", *arguments])
    return main.main()


@pytest.mark.parametrize("command", main.COMMANDS)
def test_a_command_is_a_program_of_the_package(command):
    *folders, name = main.COMMANDS[command][0].split(".")[1:]
    place = PACKAGE.joinpath(*folders)
    assert (place / f"{name}.py").is_file() or (place / name / "__main__.py").is_file()


def test_a_command_takes_the_place_of_this_process_with_its_arguments(monkeypatch):
    taken_over = []
    monkeypatch.setattr(os, "execv", lambda path, argv: taken_over.append((path, argv)))
    run(monkeypatch, "serve", "--model-path", "demo")
    command = [sys.executable, "-m", "sglang_live.launch_server", "--model-path", "demo"]
    assert taken_over == [(sys.executable, command)]


def test_help_names_every_command_and_the_version_is_the_packages(monkeypatch, capsys):
    assert run(monkeypatch, "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == list(main.COMMANDS)
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["sevre"], ["--sevre"]])
def test_what_is_no_command_is_refused(monkeypatch, capsys, arguments):
    assert run(monkeypatch, *arguments) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("usage: ")
    assert all(f"no command {name}" in said.err for name in arguments)


def test_the_installed_script_is_this_program():
    setup = (Path(__file__).parents[2] / "setup.py").read_text("utf-8")
    entry = EntryPoint("sglang-live", "sglang_live.__main__:main", "console_scripts")
    assert f'"{entry.name} = {entry.value}"' in setup
    assert entry.load() is main.main
