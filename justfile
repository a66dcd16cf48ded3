# Short names for the commands of this repository; CONTRIBUTING.md lists them.
# `just` is a convenience: each recipe is one plain command that you can type instead.

set positional-arguments

python := ".venv/bin/python"

# List the recipes.
default:
    @just --list --unsorted

# Make or refresh .venv with everything that the tests need.
setup *ARGS:
    scripts/setup.sh --test "$@"

# Format all Python files.
fmt:
    {{ python }} -m ruff format .

# Check style and format, change nothing.
lint:
    {{ python }} -m ruff check . && {{ python }} -m ruff format --check .

# Check types; pyproject.toml says which files, and how strictly.
types:
    {{ python }} -m mypy

# Run unit tests, of one room or all; arguments go to pytest: just unit test/unit/policy -k pacing
unit PATH="test/unit" *ARGS:
    {{ python }} -m pytest -q "$@"

# Run tests with real engines on the CPU (minutes).
engine *ARGS:
    {{ python }} -m pytest test/engine "$@"

# Run tests of the whole server and its page (minutes).
e2e *ARGS:
    {{ python }} -m pytest test/e2e "$@"

# Set up, then run the checks that need no engine: what a commit should pass.
fast *ARGS:
    scripts/test.sh --fast "$@"

# Set up, then run checks and tests as continuous integration does.
ci *ARGS:
    scripts/test.sh "$@"

# The same with the nightly variants.
all *ARGS:
    scripts/test.sh --all "$@"

# Start the server with the demo model and have one conversation; --serve keeps it running.
demo *ARGS:
    scripts/demo.sh "$@"

# Report which changes of a room's source its unit tests miss, for example: just mutants policy 1
mutants ROOM SEED="1" N="60":
    {{ python }} scripts/mutants.py {{ ROOM }} --n {{ N }} --seed {{ SEED }}

# Compare every seam with the installed SGLang.
seams:
    {{ python }} scripts/check_seams.py

# Try another SGLang than the pinned one: just upstream 0.5.23
upstream VERSION *ARGS:
    scripts/check_upstream.sh "$@"

# Check that documents name only what exists, explain all flags, and use the glossary's words.
docs:
    {{ python }} -m pytest -q test/unit/test_docs.py test/unit/test_words.py

# Write the result tables of docs/ and benchmark/notes/ from benchmark/results.
tables:
    {{ python }} -m benchmark.summary

# Write requirements/locked/ after a pin in requirements/ changed (needs a package index).
lock:
    scripts/lock.sh

# Build a release into a folder: just release dist
release DIR *ARGS:
    scripts/release.sh {{ ARGS }} {{ DIR }}
