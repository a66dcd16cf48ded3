#!/usr/bin/env bash
# Read by scripts/setup.sh: what it needs of disk and network, and what to do after a failure.
# shellcheck shell=bash disable=SC2154

# Of each step, in MB: what it downloads, and what it leaves on the disk.
declare -A download_mb=(
    [sglang]=70 [packages]=360 [torch]=190 [torch_published]=2540 [cuda]=4400
    [test]=140 [programs]=120 [clients]=130 [cluster]=80 [bench]=10 [training]=30
)
declare -A installed_mb=(
    [venv]=30 [sglang]=220 [packages]=1250 [torch]=750 [torch_published]=3850 [cuda]=9000
    [bytecode]=420 [test]=250 [programs]=420 [clients]=700 [cluster]=230 [bench]=30 [training]=60
)

has_cpu_build() {
    # pip takes it before the published build: a version with a local part is the later one.
    local pinned
    pinned=$(sed -n 's/^torch==//p' requirements/cpu.txt)
    [[ $("$VENV/bin/python" -m pip index versions torch 2>/dev/null) == *"$pinned+cpu"* ]]
}

gb() {
    awk -v mb="$1" 'BEGIN { printf "%.1f GB", mb / 1000 }'
}

free_mb() {
    # In $1, or in the nearest folder above it that exists.
    local folder=$1
    while [[ ! -d $folder ]]; do folder=$(dirname "$folder"); done
    df -Pm "$folder" | awk 'NR == 2 { print $4 }'
}

tell_sizes() {
    # Of the steps "$@". Fails if the disk has no room for them.
    local step key down=0 disk=0 largest=0 free published=0
    local present=''
    if [[ -d $(site_packages)/torch ]]; then present=' sglang packages torch cuda bytecode '; fi
    for step; do
        key=$step
        [[ $present != *" $step "* ]] || continue
        if [[ $step == torch ]] && ! has_cpu_build; then
            key=torch_published
            published=1
        fi
        ((down += ${download_mb[$key]:-0}, disk += ${installed_mb[$key]:-0})) || true
        if ((${download_mb[$key]:-0} > largest)); then largest=${download_mb[$key]}; fi
    done
    ((down)) || return 0
    # pip holds what a step downloads in its temporary folder and in its cache.
    free=$(free_mb "$VENV")
    echo "needs $(gb "$down") of downloads and $(gb "$disk") of disk, $(gb $((disk + 2 * largest)))" \
        "while packages are unpacked ($(gb "$free") are free)"
    if ((published)); then
        cat <<TEXT
The package index offers PyTorch with its CUDA libraries alone. Its build for the CPU downloads
$(gb $((download_mb[torch_published] - download_mb[torch]))) less and takes $(gb $((installed_mb[torch_published] - installed_mb[torch]))) less of disk. To use it, press Ctrl-C, set PIP_EXTRA_INDEX_URL
to PyTorch's own index of CPU builds (pytorch.org, "Get started", shows its address: choose pip and
CPU), or PIP_FIND_LINKS to a folder with that wheel, and run the same command again.
TEXT
    fi
    if ((free < disk + 2 * largest)); then
        echo "No space left on device: $(gb "$free") free in $(dirname "$VENV")" >&2
        return 1
    fi
}

advice() {
    # One line for the log $1 of a step that ended with status $2.
    local text again="and run the same command again: finished steps are skipped"
    text=$(tail -n 60 "$1")
    # A full disk has no room for the log either.
    if (($(free_mb "$VENV") < 20)); then text="No space left on device"; fi
    case $text in
    *"no Python 3.11 or 3.12 found"*)
        echo "install Python 3.11 or 3.12, or name one: PYTHON=/path/to/python3.12 scripts/setup.sh"
        ;;
    *"ensurepip is not available"* | *"No module named ensurepip"* | *"No module named venv"*)
        echo "install the venv module of this Python (Debian, Ubuntu: apt-get install python3-venv)," \
            "$again"
        ;;
    *"No space left on device"* | *"Disk quota exceeded"*)
        echo "free disk space (df -h $(dirname "$VENV") ${TMPDIR:-/tmp}), or use another disk: --venv" \
            "DIR, TMPDIR, PIP_CACHE_DIR; then run the same command again: finished steps are skipped"
        ;;
    *"Permission denied"* | *"Read-only file system"*)
        echo "make the folder named above writable for user $(id -u), or use --venv" \
            "DIR, TMPDIR, PIP_CACHE_DIR; then run the same command again"
        ;;
    *"DO NOT MATCH THE HASHES"*)
        echo "your package index or PIP_FIND_LINKS offers another file than the published one: see" \
            "'pip config list' and the PIP_ variables, or try PIP_CONFIG_FILE=/dev/null"
        ;;
    *ResolutionImpossible* | *"conflicting dependencies"*)
        echo "settings of your pip ask for other versions: see 'pip config list' and the PIP_" \
            "variables, or try PIP_CONFIG_FILE=/dev/null and unset PIP_CONSTRAINT"
        ;;
    *CERTIFICATE_VERIFY_FAILED* | *SELF_SIGNED_CERT*)
        echo "set PIP_CERT (npm: NODE_EXTRA_CA_CERTS) to the certificates of your proxy, $again"
        ;;
    *"name resolution"* | *"new connection"* | *"timed out"* | *"Connection refused"* | *ProxyError* | \
        *"Connection reset"* | *"Connection broken"* | *"etwork is unreachable"* | *ENOTFOUND* | \
        *ECONN* | *ETIMEDOUT* | *EAI_AGAIN* | *"Could not resolve"* | *"Unable to fetch"* | \
        *"Could not connect"*)
        echo "connect this machine, or set PIP_INDEX_URL, PIP_PROXY (npm: npm config set registry) to" \
            "what it can reach, $again"
        ;;
    *"No matching distribution found"*)
        echo "your package index has no file of it for $("$VENV/bin/python" -V 2>&1), $(uname -sm): use" \
            "Python 3.11 or 3.12 on Linux, x86_64 or aarch64, with glibc 2.34 or later, and an index" \
            "with all published files"
        ;;
    *"apt-get: command not found"* | *"sudo: "* | *"are you root"* | *"Unable to locate package"*)
        echo "as root, install Chromium and a C compiler (Debian, Ubuntu: apt-get install chromium gcc" \
            "libc6-dev), $again"
        ;;
    *"npm: command not found"*)
        echo "install Node.js with npm, $again"
        ;;
    *"Failed building wheel"* | *"Failed to build"* | *"fatal error: Python.h"*)
        echo "install a C compiler and Python's headers (Debian, Ubuntu: apt-get install" \
            "build-essential python3-dev), $again"
        ;;
    *)
        if (($2 == 137)) || [[ $text == *Killed* ]]; then
            echo "memory ran out: close other programs, $again"
        else
            echo "remove the cause that the lines above name, $again"
        fi
        ;;
    esac
}
