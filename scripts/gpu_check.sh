#!/usr/bin/env bash
# Run all checks of benchmark/gpu on a machine with an NVIDIA GPU, without downloads. Each check
# writes one JSON document to benchmark/results/gpu/.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/gpu_check.sh [--device cuda|cpu] [--tiny] [--out DIR] [--commit HASH] [CHECK ...]

  --device   cuda (default), cuda:N, or cpu: itself with itself, slow without --tiny
  --tiny     sizes that a CPU computes in seconds
  --out      folder of the JSON documents (default: benchmark/results/gpu)
  --commit   recorded in them, where the checkout has no git history
  --limit    seconds for all checks (default: 300 for each)
  CHECK      server talker thinker code_predictor code2wav flow syncs voice_load speech
             page_copy write_back constants shared_memory elastic lending (default: all, in this
             order); full_constants full_load full_policies, which need a GPU of 141 GB, and
             full_size, which is these three in 590 s

Environment: PYTHON chooses the interpreter (default: .venv's if there is one, else python3).
Sizes are options of a single check: python -m benchmark.gpu CHECK --help
Exit status: 0 if every check that could run passed, 1 if one failed.
TEXT
}

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CHECKS=(server talker thinker code_predictor code2wav flow syncs voice_load speech page_copy
    write_back constants shared_memory elastic lending)
# Of one GPU of 141 GB. The limits of the three are those of one session of 10 minutes.
FULL_SIZE=(full_constants full_load full_policies)
declare -A LIMITS=([full_constants]=270 [full_load]=160 [full_policies]=300)
CHECK_TIMEOUT_S=300
# Less is no start of a server.
LEAST_S=90
CANNOT_RUN=77

device=cuda
out=$ROOT/benchmark/results/gpu
commit=
limit=
tiny=()
checks=()

needs_value() {
    if (($# < 2)); then
        echo "gpu_check.sh: $1 needs a value" >&2
        exit 2
    fi
}

while (($#)); do
    case $1 in
    --device | --out | --commit | --limit)
        needs_value "$@"
        printf -v "${1#--}" '%s' "$2"
        shift
        ;;
    --tiny) tiny=(--tiny) ;;
    -h | --help)
        usage
        exit 0
        ;;
    full_size)
        checks+=("${FULL_SIZE[@]}")
        limit=${limit:-590}
        ;;
    *)
        if [[ " ${CHECKS[*]} ${FULL_SIZE[*]} " != *" $1 "* ]]; then
            echo "gpu_check.sh: unknown option or check $1" >&2
            usage >&2
            exit 2
        fi
        checks+=("$1")
        ;;
    esac
    shift
done
((${#checks[@]})) || checks=("${CHECKS[@]}")
if [[ ! -d $out ]]; then
    echo "gpu_check.sh: no such folder: $out" >&2
    exit 2
fi
out=$(cd "$out" && pwd)
if [[ -n $limit && ! $limit =~ ^[1-9][0-9]*$ ]]; then
    echo "gpu_check.sh: --limit takes seconds, got $limit" >&2
    exit 2
fi

python=${PYTHON:-}
if [[ -z $python ]]; then
    python=python3
    if [[ -x $ROOT/.venv/bin/python ]]; then python=$ROOT/.venv/bin/python; fi
fi
cd "$ROOT"
export PYTHONUNBUFFERED=1
# Check the code of the checkout. A package that was installed from a wheel is used instead: the
# checkout's folders alone are not the whole package.
others=${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH=$ROOT/python:$ROOT$others
if ! "$python" -c 'import sglang_live.sgl_patches' 2>/dev/null; then
    export PYTHONPATH=$ROOT$others
fi

why_no_gpu() {
    "$python" - <<'PYTHON'
try:
    import torch
except Exception as error:
    print(f"PyTorch does not import: {error}")
else:
    if not torch.cuda.is_available():
        print(f"PyTorch {torch.__version__} sees none")
PYTHON
}

if [[ $device == cuda* ]]; then
    reason=$(why_no_gpu || echo "$python does not run")
    if [[ -n $reason ]]; then
        echo "nothing was checked: no usable NVIDIA GPU ($reason)"
        nvidia-smi -L 2>/dev/null | sed 's/^/  though nvidia-smi lists: /' || true
        exit 0
    fi
fi

# Without --commit, documents are moved at the end: each records whether the checkout is dirty. With
# it they are written in place, so that they are there when this script is killed.
work=$(mktemp -d "${TMPDIR:-/tmp}/sglang_live_gpu.XXXXXX")
keep_documents() {
    find "$work" \( -name '*.json' -o -name '*.toml' \) -exec mv -- {} "$out" \;
}
trap 'keep_documents; rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
documents=$work
if [[ -n $commit ]]; then documents=$out; fi

passed=()
failed=()
skipped=()
for check in "${checks[@]}"; do
    check_limit=${LIMITS[$check]:-$CHECK_TIMEOUT_S}
    if [[ -n $limit ]]; then
        left=$((limit - SECONDS))
        if ((left < LEAST_S)); then
            echo "=== $check: no time is left"
            skipped+=("$check")
            continue
        fi
        if ((left < check_limit)); then check_limit=$left; fi
    fi
    echo "=== $check"
    status=0
    # A process of its own: a device error must not affect the next check.
    GPU_CHECK_LIMIT_S=$check_limit timeout --kill-after=30 "$check_limit" \
        "$python" -m benchmark.gpu "$check" --device "$device" "${tiny[@]}" \
        --out "$documents" ${commit:+--commit "$commit"} \
        </dev/null >"$work/output" 2>"$work/errors" || status=$?
    cat "$work/output"
    case $status in
    0) passed+=("$check") ;;
    "$CANNOT_RUN") skipped+=("$check") ;;
    *)
        failed+=("$check")
        tail -n 40 "$work/errors"
        echo "exit status $status"
        ;;
    esac
done

echo "=== passed: ${passed[*]:-none}; failed: ${failed[*]:-none}; skipped: ${skipped[*]:-none}"
((!${#failed[@]}))
