#!/usr/bin/env bash
# Make or refresh this repository's Python environment in .venv; nothing outside it is changed.
# Finished steps are skipped, so it can be run again at any time.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/setup.sh [--test] [--bench] [--train] [--device auto|cpu|cuda] [--venv DIR]

  --test     also install what scripts/test.sh needs, Chromium and a C compiler among it (apt-get)
  --bench    also install what benchmark/ needs
  --train    also install what training/ needs
  --device   auto (default) takes cuda where nvidia-smi lists a GPU
  --venv     the environment's folder (default: .venv)

Environment: PYTHON chooses the interpreter (3.11 or 3.12). pip's own settings (PIP_*,
pip.conf) are honoured; where PyTorch's CPU wheels are offered (such as by PIP_EXTRA_INDEX_URL
or PIP_FIND_LINKS) they are preferred, which saves the CUDA libraries that a machine without a
GPU cannot use. Sizes are told before the first download; the last line of a failed set-up says
what to do.
TEXT
}

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
CLIENTS=$ROOT/.venv-clients
CLUSTER=$ROOT/.venv-cluster
SITE_PTH=zz_sglang_live_torchvision.pth
cd "$ROOT"

device=auto
extras=()
while (($#)); do
    case $1 in
    --test) extras+=(test programs clients cluster) ;;
    --bench) extras+=(bench) ;;
    --train) extras+=(training) ;;
    --device)
        device=${2:-}
        shift
        ;;
    --venv)
        VENV=${2:?--venv needs a folder}
        shift
        ;;
    -h | --help)
        usage
        exit 0
        ;;
    *)
        echo "setup.sh: unknown option $1" >&2
        usage >&2
        exit 2
        ;;
    esac
    shift
done

STATE=$VENV/setup # one stamp and one log per step
# shellcheck source=scripts/setup_advice.sh
. scripts/setup_advice.sh

detect_device() {
    if [[ $(nvidia-smi -L 2>/dev/null || true) == *GPU* ]]; then echo cuda; else echo cpu; fi
}

[[ $device == auto ]] && device=$(detect_device)
if [[ $device != cpu && $device != cuda ]]; then
    echo "setup.sh: --device must be auto, cpu or cuda, not '$device'" >&2
    exit 2
fi

is_supported() {
    # Run each candidate: a version manager has shims for versions that are not installed.
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null
}

find_python() {
    local name
    for name in ${PYTHON:-python3.11 python3.12 python3}; do
        if is_supported "$name"; then
            echo "$name"
            return
        fi
    done
    echo "no Python 3.11 or 3.12 found (looked for: ${PYTHON:-python3.11 python3.12 python3})" >&2
    return 1
}

pip_install() {
    # pip would compile every file on one core; step_bytecode uses all cores.
    "$VENV/bin/python" -m pip install --no-input --disable-pip-version-check --no-compile "$@"
}

install_locked() {
    # Each list is complete: pip resolves no other packages and accepts only files with its hashes.
    pip_install --no-deps --require-hashes --requirement "requirements/locked/$1.txt"
}

compile_bytecode() {
    # Some packages ship templates that are not valid Python: their errors are ignored.
    "$VENV/bin/python" -m compileall -q -j 0 "$@" || true
}

site_packages() {
    "$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

step_venv() {
    local python
    python=$(find_python)
    "$python" -m venv "$VENV"
}

step_sglang() {
    install_locked cpu_no_deps
}

step_packages() {
    # pip unpacks on one core; meanwhile the others compile the largest package that is there.
    compile_bytecode "$(site_packages)/sglang" &
    install_locked cpu
    wait
}

step_torch() {
    # Without a hash: CPU builds of one version differ by index and by local file. Its requirements
    # are installed by hash already, except the CUDA libraries of a build with CUDA.
    pip_install --constraint requirements/cpu.txt torch setuptools
}

step_cuda() {
    rm -f "$(site_packages)/$SITE_PTH"
    pip_install --editable '.[cuda]'
    # Its model file alone; see requirements/cpu_no_deps.txt.
    pip_install --no-deps "$(grep '^pipecat-ai==' requirements/cpu_no_deps.txt)"
}

step_project() {
    pip_install --no-deps --no-build-isolation --editable .
    # The condition avoids an error at Python's start if sglang_live is uninstalled.
    echo 'import importlib.util as u; u.find_spec("sglang_live") and' \
        '__import__("sglang_live.bridge.platform.torchvision_shim", fromlist=["install"]).install()' \
        >"$(site_packages)/$SITE_PTH"
}

step_bytecode() {
    compile_bytecode "$(site_packages)"
}

step_test() {
    install_locked test
}

find_browser() {
    command -v chromium || command -v chromium-browser || command -v google-chrome
}

apt_install() {
    local as_root=()
    if ((EUID)); then as_root=(sudo); fi
    "${as_root[@]}" apt-get update
    "${as_root[@]}" apt-get install --yes --no-install-recommends "$@"
}

step_programs() {
    # The compiler is for benchmark/scaled_clock.
    command -v cc || apt_install gcc libc6-dev
    find_browser || apt_install chromium
    find_browser
}

step_clients() {
    # Third-party clients have requirements that conflict with SGLang's.
    rm -rf "$CLIENTS"
    "$VENV/bin/python" -m venv "$CLIENTS"
    "$CLIENTS/bin/python" -m pip install --no-input --disable-pip-version-check --no-compile \
        --no-deps --require-hashes --requirement requirements/locked/clients.txt
    # The lock has a hash of every package; no package needs an install script.
    npm ci --prefix docs/examples --ignore-scripts --no-audit --no-fund
}

step_cluster() {
    # Beside the server's packages, not among them: without a cluster nothing may need Ray.
    rm -rf "$CLUSTER"
    "$VENV/bin/python" -m venv "$CLUSTER"
    "$CLUSTER/bin/python" -m pip install --no-input --disable-pip-version-check --no-compile \
        --no-deps --require-hashes --requirement requirements/locked/cluster.txt
    local own
    own=$("$CLUSTER/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # Ray ends a node whose processes take 15 s to start.
    compile_bytecode "$own"
    # Behind its own packages; addsitedir also reads the .pth files there.
    echo "import site; site.addsitedir('$(site_packages)')" >"$own/zz_server.pth"
}

step_bench() {
    install_locked bench
}

step_training() {
    install_locked training
}

declare -A title=(
    [venv]="Python environment in ${VENV#"$ROOT/"}"
    [torch]="PyTorch"
    [sglang]="SGLang, without its CUDA stack"
    [packages]="packages that SGLang and the gateway need"
    [cuda]="SGLang with its CUDA stack, and sglang_live (several GB)"
    [project]="sglang_live, editable"
    [bytecode]="bytecode, for faster starts"
    [test]="test tools"
    [programs]="Chromium, for tests of the page, and a C compiler"
    [clients]="clients of other people, for the examples"
    [cluster]="Ray, in an environment of its own, for tests of clusters"
    [bench]="benchmark tools"
    [training]="what training judges with"
)

if [[ $device == cuda ]]; then
    steps=(venv cuda bytecode)
else
    steps=(venv sglang packages torch project bytecode)
fi
steps+=("${extras[@]}")

# Everything that determines the installation, including the path: the editable install has paths.
fingerprint=$({
    cat requirements/*.txt requirements/locked/*.txt docs/examples/requirements.txt docs/examples/package*.json setup.py pyproject.toml scripts/setup.sh
    echo "$device $ROOT"
} | sha256sum | cut -d' ' -f1)

ticker_pid=
stop_ticker() {
    if [[ -n $ticker_pid ]]; then
        kill "$ticker_pid" 2>/dev/null || true
        wait "$ticker_pid" 2>/dev/null || true
        ticker_pid=
    fi
}
trap stop_ticker EXIT

start_ticker() {
    [[ -t 1 ]] || return 0
    local from=$SECONDS
    while sleep 1; do printf '\r%s %d s' "$1" $((SECONDS - from)); done &
    ticker_pid=$!
}

is_done() {
    [[ -f $STATE/$1.done && $(<"$STATE/$1.done") == "$fingerprint" ]]
}

run_step() {
    local name=$1 number=$2
    local label="[$number/${#steps[@]}] ${title[$name]} ..." from=$SECONDS status=0
    if is_done "$name"; then return 0; fi
    printf '%s' "$label"
    start_ticker "$label"
    # In a subshell, and not in a condition, so that `set -e` is effective inside.
    set +e
    (
        set -e
        "step_$name"
    ) >"$STATE/$name.log" 2>&1
    status=$?
    set -e
    stop_ticker
    if ((status)); then
        printf '\r%s FAILED after %d s\n' "$label" $((SECONDS - from))
        echo "--- last lines of $STATE/$name.log"
        tail -n 25 "$STATE/$name.log"
        echo "--- set-up failed in step '$name' (${title[$name]})"
        echo "to do: $(advice "$STATE/$name.log" "$status")"
        exit 1
    fi >&2
    if [[ -t 1 ]]; then printf '\r%s' "$label"; fi
    printf ' %d s\n' $((SECONDS - from))
    echo "$fingerprint" >"$STATE/$name.done"
}

# Two concurrent set-ups would break each other. The lock is on this script: no file remains.
exec 9<"${BASH_SOURCE[0]}"
if command -v flock >/dev/null; then flock 9; fi

if [[ -e $VENV ]] && ! is_supported "$VENV/bin/python"; then
    echo "removing $VENV: it has no working Python 3.11 or 3.12"
    rm -rf "$VENV"
fi

if ! refused=$(mkdir -p "$STATE" 2>&1); then
    printf '%s\nto do: %s\n' "$refused" "$(advice <(echo "$refused"))" >&2
    exit 1
fi
missing=()
for step in "${steps[@]}"; do is_done "$step" || missing+=("$step"); done
for index in "${!steps[@]}"; do
    # The environment is the first step: its pip finds out what the index offers.
    if ((index == 1 && ${#missing[@]})) && ! tell_sizes "${missing[@]}"; then
        echo "to do: $(advice <(echo "No space left on device"))" >&2
        exit 1
    fi
    run_step "${steps[index]}" $((index + 1))
done
echo "environment ready: ${VENV#"$ROOT/"} ($device, ${SECONDS} s)"
