#!/usr/bin/env bash
# Make a folder with all that the server needs on a machine with a GPU, Python 3.12, PyTorch and
# transformers, but without sgl-kernel, FlashInfer and a network.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/gpu_bundle.sh [--python VERSION] DIR

  --python   Python of that machine (default: 3.12)
  DIR        folder to make; it must not exist. At most 60 MB:
               wheels/            SGLang without its requirements, sglang_live, and what both import
               requirements.txt   their versions and hashes
               install.sh         run it there: DIR/install.sh [options of pip install]

What the machine has is in requirements/assumed/gpu_machine.txt. Environment: PYTHON chooses the interpreter
that downloads and builds (default: .venv's if there is one, else python3); it needs pip,
setuptools and packaging.
TEXT
}

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# pip matches a tag exactly.
PLATFORMS=(manylinux1 manylinux2014 manylinux_2_17 manylinux_2_24 manylinux_2_26 manylinux_2_27
    manylinux_2_28 manylinux_2_31 manylinux_2_34)

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    usage
    exit 0
fi
version=3.12
if [[ ${1:-} == --python ]]; then
    version=${2:-}
    shift $(($# < 2 ? $# : 2))
fi
if (($# != 1)) || [[ $1 == -* || ! $version =~ ^3\.1[12]$ ]]; then
    usage >&2
    exit 2
fi
target=$1
if [[ -e $target ]]; then
    echo "gpu_bundle.sh: $target exists: remove it, or name another folder" >&2
    exit 2
fi
python=${PYTHON:-}
if [[ -z $python ]]; then
    python=python3
    if [[ -x $ROOT/.venv/bin/python ]]; then python=$ROOT/.venv/bin/python; fi
fi

work=$(mktemp -d "${TMPDIR:-/tmp}/sglang_live_bundle.XXXXXX")
trap 'rm -rf "$work"' EXIT
wheels=$work/bundle/wheels
mkdir -p "$wheels"
cd "$ROOT"

"$python" scripts/bundle_wheels.py list >"$work/missing.txt"
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
    --only-binary=:all: --python-version "$version" --implementation cp \
    $(printf -- '--platform %s_x86_64 ' "${PLATFORMS[@]}") \
    --requirement "$work/missing.txt" --dest "$wheels"
"$python" scripts/bundle_wheels.py slim "$wheels"
# A copy is built: a build leaves folders behind.
mkdir "$work/source"
git ls-files -z | xargs -0 cp --parents -t "$work/source"
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
    --wheel-dir "$wheels" "$work/source"
"$python" scripts/bundle_wheels.py check "$wheels" "$version"
"$python" scripts/bundle_wheels.py pin "$wheels" >"$work/bundle/requirements.txt"

cat >"$work/bundle/install.sh" <<'TEXT'
#!/usr/bin/env bash
# Install the folder beside this file, from nowhere else: install.sh [options of pip install].
# Environment: PYTHON (default: python3). With `--target FOLDER`, set PYTHONPATH=FOLDER afterwards.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
"${PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
    --require-hashes --find-links "$here/wheels" --requirement "$here/requirements.txt" "$@"
TEXT
chmod +x "$work/bundle/install.sh"
mkdir -p "$(dirname "$target")"
mv "$work/bundle" "$target"
echo "$target: $(du -sm "$target" | cut -f1) MB; install it there with install.sh"
