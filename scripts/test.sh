#!/usr/bin/env bash
# Set up, then check formatting and types and run the tests.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/test.sh [--fast | --all | --core] [PYTEST ARGUMENT...]

  --fast   format, types and the unit tests, without engines (about 4 minutes on two cores)
  --all    also the tests marked `nightly`: more variants of what the others show once
  --core   only the unit and end-to-end tests of the core, in a copy of the repository from which
           extensions/ and lab/ are deleted

Without either: format, types, whether every set-up has a solution (which asks the package index),
unit tests, and engine and end-to-end tests.
TEXT
}

extent=default
case ${1:-} in
--fast | --all | --core)
    extent=${1#--}
    shift
    ;;
-h | --help)
    usage
    exit 0
    ;;
esac

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
bash scripts/setup.sh --test </dev/null

python=$ROOT/.venv/bin/python
failed=()
n_pytest_args=$#
# The time of set-up depends on the network, that of the tests on this repository.
SECONDS=0

check() {
    local name=$1
    shift
    echo "=== $name"
    local status=0 from=$SECONDS
    # All checks run, so that one run shows all failures.
    "$@" </dev/null || status=$?
    # 5 is pytest's "no tests collected": -k may select tests of the other phase only.
    if ((status == 5 && n_pytest_args)); then status=0; fi
    if ((status)); then failed+=("$name"); fi
    echo "--- $name: $((SECONDS - from)) s"
}

marks=(-m "not nightly")
if [[ $extent == all ]]; then
    marks=()
    export SGLANG_LIVE_NIGHTLY=1 # more examples of the engine tests
fi

core_tests() {
    local copy status=0
    copy=$(mktemp -d)
    git ls-files -z | tar --create --null --files-from=- | tar --extract --directory "$copy"
    ln -s "$ROOT/.venv" "$ROOT/.venv-clients" "$copy"
    ln -s "$ROOT/docs/examples/node_modules" "$copy/docs/examples"
    cd "$copy"
    rm -r python/sglang_live/extensions lab
    # What the deleted rooms are for, and what describes the repository as it is.
    local others=(test/unit/{extensions,lab,benchmark,packaging,test_imports.py,test_text_files.py})
    others+=(test/unit/test_main.py test/e2e/test_release.py)
    mapfile -t -O ${#others[@]} others < <(
        grep -rlE '^\s*(from|import) (lab|benchmark|sglang_live\.extensions)\b' --include=*.py test
        grep -rl 'device_waits' --include=test_*.py test
    )
    PYTHONPATH=$copy/python:$copy "$python" -m pytest test/unit test/e2e --numprocesses 2 \
        --dist loadfile "${marks[@]}" "${others[@]/#/--ignore=}" "$@" || status=$?
    cd "$ROOT"
    rm -r "$copy"
    return "$status"
}
if [[ $extent == core ]]; then
    check "core" core_tests "$@"
    ((${#failed[@]} == 0)) || exit 1
    exit
fi

# mypy has one core's work: it runs beside what follows, and is heard after the unit tests.
types=$(mktemp)
"$python" -m mypy </dev/null >"$types" 2>&1 &
mypy=$!
trap '[[ -z $mypy ]] || kill "$mypy" 2>/dev/null || true; rm -f "$types"' EXIT
types_checked() {
    local status=0
    wait "$mypy" || status=$?
    mypy=
    cat "$types"
    return "$status"
}

check "ruff check" "$python" -m ruff check .
check "ruff format" "$python" -m ruff format --check .
if [[ $extent != fast ]]; then
    # Metadata from the package index: a set-up for other machines than this one still has a solution.
    check "installation" "$python" scripts/check_install.py
fi
# Unit tests first: they fail in seconds, the engines take minutes. A process for each part imports and
# collects that part only; each worker of pytest-xdist would import and collect all of them.
unit_tests() {
    # The longest first: the shortest fill what is left at the end.
    local large=(test/unit/{gateway,benchmark,extensions,bridge}) rest=() part
    for part in test/unit/*/ test/unit/test_*.py; do
        [[ " ${large[*]} test/unit/__pycache__ " == *" ${part%/} "* ]] || rest+=("${part%/}")
    done
    local parts=("${large[0]}" "${rest[*]}" "${large[@]:1}")
    local arguments=("$python" -m pytest -q --no-header "${marks[@]}" "$@")
    # What a part says comes as one piece, when it has ended.
    # shellcheck disable=SC2016
    printf '%s\0' "${parts[@]}" | xargs -0 -P "$(nproc)" -I{} bash -c '
        status=0
        said=$("${@:2}" $1 2>&1) || status=$?
        printf "%s\n" "== $1" "$said"
        # 5: -k selects no test of this part
        ((status == 0 || status == 5))
    ' _ {} "${arguments[@]}"
}
check "unit tests" unit_tests "$@"
# Those of one file run in one process, because they share engines. In the order of the files: the
# engines of one folder end before the next one's start.
files=(--dist loadfile --no-loadscope-reorder "$@")
check "mypy" types_checked
if [[ $extent != fast ]]; then
    # Two processes at most: one computes while the other waits, for sound that is played or for an
    # engine's start. More engines at once would slow each other.
    check "engine and end-to-end tests" "$python" -m pytest test/engine test/e2e test/cluster --numprocesses 2 \
        "${marks[@]}" "${files[@]}"
    if [[ $extent == all ]]; then
        # benchmark/notes/gpu.md, decode graphs without a GPU
        check "engine tests on decode graphs" env LAB_CPU_GRAPHS=1,2,4,8 \
            SGLANG_LIVE_ATTACH=lab.cpu_graphs.attach:attach \
            "$python" -m pytest test/engine/test_{pauses,truncation,long_responses,retention}.py \
            --numprocesses 2 -m "not nightly" "${files[@]}"
    fi
fi

if ((${#failed[@]})); then
    printf -v names '%s, ' "${failed[@]}"
    echo "FAILED after ${SECONDS} s: ${names%, }"
    exit 1
fi
echo "all passed in ${SECONDS} s"
