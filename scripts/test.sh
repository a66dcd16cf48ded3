#!/usr/bin/env bash
# Set up, then check formatting and run all tests. Extra arguments go to pytest.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
bash scripts/setup.sh --test </dev/null

python=$ROOT/.venv/bin/python
failed=()
n_pytest_args=$#

check() {
    local name=$1
    shift
    echo "=== $name"
    local status=0
    # All checks run, so that one run shows all failures.
    "$@" </dev/null || status=$?
    # 5 is pytest's "no tests collected": -k may select tests of the other phase only.
    if ((status == 5 && n_pytest_args)); then status=0; fi
    if ((status)); then failed+=("$name"); fi
}

has_tests() {
    [[ -d $1 && -n $(find "$1" -name 'test_*.py' -print -quit) ]]
}

run_tests() {
    local name=$1
    shift
    local folders=()
    while (($#)) && [[ $1 != -- ]]; do
        if has_tests "$1"; then folders+=("$1"); fi
        shift
    done
    shift
    if ((${#folders[@]})); then
        check "$name" "$python" -m pytest "${folders[@]}" "$@"
    fi
}

check "ruff check" "$python" -m ruff check .
check "ruff format" "$python" -m ruff format --check .
# Unit tests first: they fail in seconds, the engines take minutes.
run_tests "unit tests" test/unit -- "$@"
run_tests "engine and end-to-end tests" test/engine test/e2e -- "$@"

if ((${#failed[@]})); then
    printf -v names '%s, ' "${failed[@]}"
    echo "FAILED after ${SECONDS} s: ${names%, }"
    exit 1
fi
echo "all passed in ${SECONDS} s"
