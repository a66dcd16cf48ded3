#!/usr/bin/env python3
"""Resolve what every set-up installs, for every platform, from the public package index alone.

    .venv/bin/python scripts/check_install.py

Settings of pip and of the index on this machine are ignored, because they can hide a conflict: a
folder of wheels may offer a build with other requirements than the published one. Only metadata is
read; nothing is installed. UV_DEFAULT_INDEX names a mirror of the index.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import time
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from distutils.core import run_setup
from pathlib import Path

# isort: off (setuptools provides distutils)
import setuptools

# isort: on

ROOT = Path(__file__).parents[1]
LIMIT_S = 180.0
_N_AT_ONCE = 8
PYTHONS, MACHINES = ("3.11", "3.12"), ("x86_64", "aarch64")
# The oldest C library for which SGLang has wheels.
C_LIBRARY = "manylinux_2_34"
DEVICES = ("cpu", "cuda")
LOCKED = ("cpu", "cpu_no_deps", "test", "bench", "training", "release")
# Published as source alone, for some Python or for all.
SOURCES = "docopt\npocketsphinx\n"
# The published PyTorch requires these, its CPU builds do not.
CUDA_LIBRARIES = re.compile(r"(nvidia|cuda)-")
_CPU_BUILD_REQUIRES = (
    "filelock", "typing-extensions>=4.10.0", "setuptools>=77.0.3", "sympy>=1.13.3",
    "networkx>=2.5.1", "jinja2", "fsspec>=0.8.5",
)  # fmt: skip
_COMPILE = ("compile", "-", "--no-annotate", "--no-header", "--no-emit-find-links")
_UNREACHABLE = re.compile(r"error sending request|dns error|timed out|Connection refused", re.I)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """One call of uv.

    requires: what it resolves, as the lines of a requirements file.
    within: names that the result may have; None: any.
    """

    title: str
    python: str
    machine: str
    arguments: tuple[str, ...]
    requires: str = ""
    within: frozenset[str] | None = None

    def command(self) -> list[str]:
        uv = str(Path(sysconfig.get_path("scripts")) / "uv")
        platform = f"{self.machine}-{C_LIBRARY}"
        return [
            *(uv, "pip", *self.arguments, "--no-config", "--no-python-downloads"),
            *(f"--python={sys.executable}", f"--python-version={self.python}"),
            *(f"--python-platform={platform}", "--only-binary=:all:"),
        ]


def _version(package: str) -> str:
    """The version that requirements/ pins."""
    text = "".join(path.read_text("utf-8") for path in (ROOT / "requirements").glob("*.txt"))
    return re.search(rf"^{package}==(.+)$", text, re.MULTILINE)[1]


def locked_names(list_name: str) -> frozenset[str]:
    text = (ROOT / "requirements" / "locked" / f"{list_name}.txt").read_text("utf-8")
    return frozenset(re.findall(r"^([a-z0-9-]+)==", text, re.MULTILINE))


def make_wheel(folder: Path, name: str, version: str, requires: Iterable[str] = ()) -> None:
    """An empty wheel with these metadata."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        metadata += "".join(f"Requires-Dist: {line}\n" for line in requires)
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def resolutions(scratch: Path) -> Iterator[Resolution]:
    """scratch: an empty folder, for files that the resolutions read."""
    # As PyTorch's own index has it.
    (torch := scratch / "torch").mkdir()
    make_wheel(torch, "torch", f"{_version('torch')}+cpu", _CPU_BUILD_REQUIRES)
    (scratch / "sources.txt").write_text(SOURCES, "utf-8")
    package = run_setup("setup.py", stop_after="config")
    # As a release has them (scripts/release.sh).
    (release := scratch / "release").mkdir()
    for line in package.extras_require["cpu"]:
        name, _, version = line.partition("==")
        if version.endswith("+nodeps"):
            make_wheel(release, name, version)
    for python in PYTHONS:
        for machine in MACHINES:
            yield from _locked(scratch, python, machine)
            for device in DEVICES:
                yield from _extras(package, device, release, python, machine)
            yield from _torch(torch, python, machine)


def _locked(scratch: Path, python: str, machine: str) -> Iterator[Resolution]:
    """The locked lists have hashes of files for this platform."""
    for names in (LOCKED, ("clients",), ("cluster",)):
        lists = [f"--requirement=requirements/locked/{name}.txt" for name in names]
        yield Resolution(
            title=f"locked: {', '.join(names)}",
            python=python,
            machine=machine,
            arguments=(
                *("install", "--dry-run", "--no-deps", "--require-hashes", *lists),
                *(f"--excludes={scratch / 'sources.txt'}", f"--target={scratch / 'target'}"),
            ),
        )


def _extras(
    package: "setuptools.Distribution", device: str, release: Path, python: str, machine: str
) -> Iterator[Resolution]:
    """`pip install .[cpu]` beside a release; `.[cuda]`, which scripts/setup.sh runs on a GPU."""
    extras = (
        device,
        "whisper",
        "media",
        "webrtc",
        "cluster",
        *(("test", "bench") if device == "cpu" else ()),
    )
    lines = [*package.install_requires]
    for extra in extras:
        lines += package.extras_require[extra]
    yield Resolution(
        title=f".[{','.join(extras)}]",
        python=python,
        machine=machine,
        arguments=(*_COMPILE, f"--find-links={release}"),
        requires="\n".join(lines),
    )


def _torch(builds: Path, python: str, machine: str) -> Iterator[Resolution]:
    """PyTorch beside the locked packages, as scripts/setup.sh installs it without a GPU."""
    for title, links in (("torch", ()), ("torch's CPU build", (f"--find-links={builds}",))):
        yield Resolution(
            title=f"setup.sh: {title}",
            python=python,
            machine=machine,
            arguments=(*_COMPILE, "--constraint=requirements/cpu.txt", *links),
            requires="torch\nsetuptools\n",
            within=locked_names("cpu") | {"torch"},
        )


def resolve(resolution: Resolution, deadline_s: float) -> str:
    """Returns what is wrong, or an empty text."""
    own = ("PIP_", "UV_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(own)}
    if index := os.environ.get("UV_DEFAULT_INDEX"):
        environment["UV_DEFAULT_INDEX"] = index
    try:
        done = subprocess.run(
            resolution.command(),
            input=resolution.requires,
            env=environment,
            cwd=ROOT,
            capture_output=True,
            encoding="utf-8",
            timeout=max(0.1, deadline_s - time.monotonic()),
        )
    except subprocess.TimeoutExpired:
        return f"timed out: all resolutions must end within {LIMIT_S:.0f} s"
    if done.returncode:
        return done.stderr.strip()
    new = unlocked(done.stdout, resolution.within) if resolution.within else []
    return f"not in requirements/locked/cpu.txt: {', '.join(new)}" if new else ""


def unlocked(output: str, within: frozenset[str]) -> list[str]:
    """The packages of a resolution that pip would install beside those, CUDA libraries aside."""
    names = re.findall(r"^([a-z0-9-]+)==", output, re.MULTILINE)
    return [name for name in names if name not in within and not CUDA_LIBRARIES.match(name)]


def report(wanted: list[Resolution], faults: Iterable[str]) -> str:
    """Print the outcomes; returns the last line."""
    n_failed = 0
    for resolution, fault in zip(wanted, faults, strict=True):
        if _UNREACHABLE.search(fault):
            return (
                "NOT CHECKED: the public package index cannot be reached. Connect this machine, or "
                f"set UV_DEFAULT_INDEX to a mirror, and run it again: {fault.splitlines()[-1]}"
            )
        state = "FAILED" if fault else "ok"
        n_failed += bool(fault)
        print(f"{state:6} Python {resolution.python} {resolution.machine:7} {resolution.title}")
        if fault:
            print(textwrap.indent(fault, "       "))
    if n_failed:
        return (
            f"{n_failed} of {len(wanted)} set-ups cannot be installed: change the pins in "
            "requirements/ or setup.py, and run scripts/lock.sh"
        )
    return ""


def main() -> int:
    os.chdir(ROOT)
    began_s = time.monotonic()
    pool = ThreadPoolExecutor(_N_AT_ONCE)
    with tempfile.TemporaryDirectory(prefix="check_install-") as scratch:
        wanted = list(resolutions(Path(scratch)))
        last = report(wanted, pool.map(lambda r: resolve(r, began_s + LIMIT_S), wanted))
        pool.shutdown(cancel_futures=True)
    print(last or f"{len(wanted)} set-ups resolve ({time.monotonic() - began_s:.0f} s)")
    return 1 if last else 0


if __name__ == "__main__":
    sys.exit(main())
