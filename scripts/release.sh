#!/usr/bin/env bash
# Build a release from the files that git tracks: packages, a bill of materials, checksums, images.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/release.sh [--here] DIR

  --here   SGLang for the Python that builds and for this machine alone, and no images
  DIR      folder to make; it must not exist:
             sglang_live-*.whl, .tar.gz   the package, and the source that it was built from
             *+nodeps-*.whl               what `sglang-live[cpu]` needs beside the package index:
                                          packages as published, without their requirements
             sbom.cdx.json                what an installation for the CPU has, with hashes (CycloneDX)
             SHA256SUMS                   of all these

Images, sglang_live:VERSION-cpu and -cuda, are built where docker, podman or buildah runs.
Environment: PYTHON chooses the interpreter that builds (default: .venv's if there is one, else
python3).
TEXT
}

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# Pythons and machines that setup.py and SGLang support.
PYTHONS=(3.11 3.12)
MACHINES=(x86_64 aarch64)

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    usage
    exit 0
fi
here=
if [[ ${1:-} == --here ]]; then
    here=1
    shift
fi
if (($# != 1)) || [[ $1 == -* ]]; then
    usage >&2
    exit 2
fi
target=$1
if [[ -e $target ]]; then
    echo "release.sh: $target exists: remove it, or name another folder" >&2
    exit 2
fi
python=${PYTHON:-}
if [[ -z $python ]]; then
    python=python3
    if [[ -x $ROOT/.venv/bin/python ]]; then python=$ROOT/.venv/bin/python; fi
fi

work=$(mktemp -d "${TMPDIR:-/tmp}/sglang_live_release.XXXXXX")
trap 'rm -rf "$work"' EXIT
dist=$work/dist
mkdir "$dist" "$work/source" "$work/unpacked"
cd "$ROOT"

"$python" -m pip install --quiet --no-input --disable-pip-version-check --no-deps --no-compile \
    --require-hashes --requirement requirements/locked/release.txt --target "$work/tools"
tool() {
    PYTHONPATH=$work/tools "$python" -m "$@"
}

# The time of the commit in archives: the same commit gives the same wheel.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
git ls-files -z | xargs -0 cp --parents -t "$work/source"
build() {
    (cd "$1" && PYTHONPATH=$work/tools "$python" -c \
        "from setuptools import build_meta; build_meta.$2('$dist')") >"$work/build.log" 2>&1 \
        || { cat "$work/build.log" >&2; exit 1; }
}
build "$work/source" build_sdist
# The wheel is built from the archive, which so has all that a wheel needs.
tar --extract --file "$dist"/sglang_live-*.tar.gz --directory "$work/unpacked" --strip-components 1
build "$work/unpacked" build_wheel
wheel=$(basename "$dist"/sglang_live-*.whl)
version=${wheel#sglang_live-}
version=${version%%-*}

download() {
    local name=$1
    shift
    # Its lines of the list, which end with the first that has no backslash.
    sed -n "/^$name==/,/[^\\\\]\$/p" requirements/locked/cpu_no_deps.txt >"$work/$name.txt"
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps \
        --require-hashes --requirement "$work/$name.txt" --dest "$work/published" "$@"
}
for_machine() {
    # pip matches a tag exactly.
    local n
    printf -- '--only-binary=:all:\n--implementation=cp\n--python-version=%s\n' "$1"
    for n in manylinux1 manylinux2014 manylinux_2_{17,24,26,27,28,31,34}; do
        echo "--platform=${n}_$2"
    done
}
for name in $(sed -n 's/^Requires-Dist: \([a-z-]*\)==[^;]*+nodeps.*/\1/p' "$work/unpacked/PKG-INFO"); do
    if [[ $here ]]; then
        download "$name"
        continue
    fi
    for one in "${PYTHONS[@]}"; do
        for machine in "${MACHINES[@]}"; do
            mapfile -t options < <(for_machine "$one" "$machine")
            download "$name" "${options[@]}"
        done
    done
done
for path in "$work"/published/*.whl; do
    tool wheel unpack --dest "$work/loose" "$path" >/dev/null
    # The headers end at the first empty line. Licences want it said that a file was changed.
    sed -i -e '1,/^$/{/^Requires-Dist:/d; /^Provides-Extra:/d; s/^Version: .*/&+nodeps/' \
        -e 's/^Summary: /&[its requirements were removed for sglang_live] /}' \
        "$work"/loose/*/*.dist-info/METADATA
    for folder in "$work"/loose/*/*.{dist-info,data}; do
        if [[ -d $folder ]]; then mv "$folder" "${folder%.*}+nodeps.${folder##*.}"; fi
    done
    tool wheel pack --dest-dir "$dist" "$work"/loose/* >/dev/null
    rm -r "$work/loose"
done

# PyTorch is in no list of hashes (scripts/lock.sh).
{
    cat requirements/locked/cpu.txt requirements/locked/cpu_no_deps.txt
    grep '^torch==' requirements/cpu.txt
    echo "sglang-live==$version --hash=sha256:$(sha256sum "$dist/$wheel" | cut -d' ' -f1)"
} >"$work/installed.txt"
tool cyclonedx_py requirements --output-reproducible --output-format JSON \
    --output-file "$dist/sbom.cdx.json" "$work/installed.txt"
(cd "$dist" && sha256sum -- * >SHA256SUMS)
mkdir -p "$(dirname "$target")"
mv "$dist" "$target"
echo "$target: sglang_live $version, $(du -sm "$target" | cut -f1) MB"

if [[ $here ]]; then exit 0; fi
for builder in docker podman buildah; do
    # A client without an engine builds nothing.
    "$builder" info >/dev/null 2>&1 || continue
    for device in cpu cuda; do
        "$builder" build --file "deploy/Dockerfile.$device" --tag "sglang_live:$version-$device" "$work/source"
    done
    exit 0
done
echo "no images: neither docker nor podman nor buildah runs here"
