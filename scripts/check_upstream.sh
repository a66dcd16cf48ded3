#!/usr/bin/env bash
# Try another SGLang than the pinned one: what of it that sglang_live uses has changed, and which
# engine tests fail with it. Needs a package index; .venv and the pins stay as they are.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/check_upstream.sh VERSION [PYTEST ARGUMENT...]

Installs SGLang VERSION, and the versions that it asks for of the packages in requirements/cpu.txt,
into build/upstream-VERSION. Then compares all seams and used private names, and runs the engine
tests (PYTEST ARGUMENTs select some of them: test/engine/test_pauses.py -k overlap).

PyTorch and torchvision keep this repository's versions: of those that SGLang asks for there may be
no CPU build. All differences are listed.

Exit status: 0 if nothing broke, 1 otherwise.
TEXT
}

case ${1:-} in
-h | --help)
    usage
    exit 0
    ;;
[0-9]*) ;;
*)
    usage >&2
    exit 2
    ;;
esac

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
version=$1
shift
venv=$ROOT/build/upstream-$version
python=$venv/bin/python
broke=()

pip_install() {
    "$python" -m pip install --quiet --no-input --disable-pip-version-check --no-deps "$@"
}

metadata() {
    echo "$venv"/lib/python3*/site-packages/sglang-*.dist-info/METADATA
}

mkdir -p build
bash scripts/setup.sh --device cpu --venv "$venv" </dev/null
pip_install --require-hashes --requirement requirements/locked/test.txt
# Kept across runs: after the first, the environment has the other SGLang.
[[ -s $venv/pinned_metadata ]] || cp "$(metadata)" "$venv/pinned_metadata"
pip_install "sglang==$version"

echo "=== requirements that differ"
"$python" scripts/upstream_pins.py "$venv/pinned_metadata" "$(metadata)" \
    requirements/cpu.txt requirements/cpu_no_deps.txt | tee "$venv/differences.txt"
sed -n 's/^INSTALL *//p' "$venv/differences.txt" >"$venv/install.txt"
if [[ -s $venv/install.txt ]]; then pip_install --requirement "$venv/install.txt"; fi

echo "=== seams and private names"
if ! "$python" scripts/check_seams.py >"$venv/seams.txt"; then broke+=("seams or names"); fi
# A mismatched seam has its target and both signatures in the four lines after it.
grep -A 4 -E ' MISMATCH ' "$venv/seams.txt" || true
grep '^CHANGED' "$venv/seams.txt" || true
tail -n 1 "$venv/seams.txt"

echo "=== engine tests"
tests=()
for argument in "$@"; do
    if [[ -e ${argument%%::*} ]]; then tests+=("$argument"); fi
done
((${#tests[@]})) || set -- test/engine "$@"
if ! "$python" -m pytest -m "not nightly" -q --tb=line -p no:cacheprovider "$@" </dev/null; then
    broke+=("engine tests")
fi

if ((${#broke[@]})); then
    printf -v what '%s, ' "${broke[@]}"
    echo "SGLang $version breaks: ${what%, }"
    exit 1
fi
echo "SGLang $version: nothing broke"
