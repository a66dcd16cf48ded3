#!/usr/bin/env bash
# Write requirements/locked/: the pinned packages of requirements/, with the hash of every file of
# that version in the package index. Run it after changing a pin, and commit both.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
UV=$(grep '^uv==' requirements/test.txt)
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"${PYTHON:-python3}" -m venv "$tools/venv"
"$tools/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$UV"

compile() {
    # --universal: one file for Python 3.11 and 3.12, x86_64 and aarch64.
    "$tools/venv/bin/uv" pip compile --quiet --no-config --universal --python-version 3.11 \
        --generate-hashes --no-annotate --no-header --no-emit-index-url --no-emit-find-links "$@"
}

mkdir -p requirements/locked
for name in cpu cpu_no_deps test bench training cluster release; do
    # PyTorch's CPU indexes have other hashes: scripts/setup.sh pins its version.
    grep -v '^torch==' "requirements/$name.txt" >"$tools/$name.in"
    compile --no-deps "$tools/$name.in" --output-file "requirements/locked/$name.txt"
done
compile docs/examples/requirements.txt --output-file requirements/locked/clients.txt
