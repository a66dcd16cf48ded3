"""The parts of scripts/gpu_bundle.sh that read and write packages.

    python scripts/bundle_wheels.py list >requirements.txt    # what the machine lacks, with hashes
    python scripts/bundle_wheels.py slim wheels               # drop files that are never read
    python scripts/bundle_wheels.py pin wheels >requirements.txt
    python scripts/bundle_wheels.py check wheels 3.12         # is every requirement met?

Exit status of check: 0, or 1 with one line per requirement that is not met.
"""

import base64
import csv
import hashlib
import io
import re
import sys
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "requirements"
MAX_BYTES = 60 * 10**6
# Of the locked lists, with the reason.
LEFT_OUT = {
    "pipecat-ai": "12 MB for semantic_vad alone, which the server does without",
}
# Files that neither SGLang's server nor sglang_live reads, by package.
NEVER_READ = {
    "sglang": r"sglang/(multimodal_gen/|test/|srt/rust_extensions/_bench\.)",
    "silero-vad": r"silero_vad/data/(?!silero_vad_16k_sequence\.onnx)",
    "jedi": r"jedi/third_party/",
}
# SGLang is installed without its requirements, the CUDA stack. What it imports is in cpu.txt.
WITHOUT_REQUIREMENTS = {"sglang"}
_MACHINE = {
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "os_name": "posix",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "extra": "",
}


def base_packages() -> dict[str, str | None]:
    """What the machine has: name and, where it is known, version."""
    found: dict[str, str | None] = {}
    for line in (REQUIREMENTS / "assumed" / "gpu_machine.txt").read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            found[canonicalize_name(name)] = version or None
    return found


def missing_packages() -> list[str]:
    """Entries of the locked lists, with their hashes, that the machine lacks."""
    base = base_packages()
    entries = []
    for name in ("cpu", "cpu_no_deps"):
        text = (REQUIREMENTS / "locked" / f"{name}.txt").read_text("utf-8")
        entries += re.findall(r"^\S.*(?:\n .*)*", text, re.MULTILINE)
    return [
        entry
        for entry in entries
        if (name := canonicalize_name(entry.partition("==")[0])) not in base
        and name not in LEFT_OUT
    ]


def slim(path: Path) -> None:
    """Write a wheel again without the files that are never read."""
    name = parse_wheel_filename(path.name)[0]
    if name not in NEVER_READ:
        return
    unread = re.compile(NEVER_READ[name])
    small = path.with_suffix(".slim")
    with (
        zipfile.ZipFile(path) as old,
        zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED, True, 9) as new,
    ):
        record = next(n for n in old.namelist() if n.endswith(".dist-info/RECORD"))
        for item in old.infolist():
            if item.filename != record and not unread.match(item.filename):
                new.writestr(item, old.read(item), zipfile.ZIP_DEFLATED, 9)
        rows = csv.reader(io.StringIO(old.read(record).decode()))
        kept = io.StringIO()
        csv.writer(kept, lineterminator="\n").writerows(r for r in rows if not unread.match(r[0]))
        new.writestr(record, kept.getvalue())
    small.replace(path)


def pins(wheels: Path) -> Iterator[str]:
    for path in sorted(wheels.glob("*.whl")):
        name, version, _, _ = parse_wheel_filename(path.name)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        yield f"{name}=={version} --hash=sha256:{digest}"


def unmet(wheels: Path, python: str) -> Iterator[str]:
    """One line per requirement of a wheel that neither folder nor machine meets.

    Args:
        python: as "3.12".
    """
    environment = {**_MACHINE, "python_version": python, "python_full_version": f"{python}.0"}
    paths = sorted(wheels.glob("*.whl"))
    parsed = [parse_wheel_filename(path.name) for path in paths]
    there = base_packages() | {name: str(version) for name, version, _, _ in parsed}
    for path, (name, _, _, tags) in zip(paths, parsed, strict=True):
        if not any(_fits(str(tag), python) for tag in tags):
            yield f"{path.name} is not for Python {python} on x86-64"
        if name in WITHOUT_REQUIREMENTS:
            continue
        for requirement in _requirements(path):
            needed = canonicalize_name(requirement.name)
            if requirement.marker and not requirement.marker.evaluate(environment):
                continue
            if needed not in there:
                yield f"{name} requires {requirement}: in neither list"
            elif (version := there[needed]) and not requirement.specifier.contains(
                version, prereleases=True
            ):
                yield f"{name} requires {requirement}: {version} is there"


def broken_records(wheels: Path) -> Iterator[str]:
    """Files of a wheel whose hash is not the recorded one."""
    for path in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(path) as wheel:
            record = next(n for n in wheel.namelist() if n.endswith(".dist-info/RECORD"))
            names = set(wheel.namelist())
            for name, digest, _ in csv.reader(io.StringIO(wheel.read(record).decode())):
                if name not in names:
                    yield f"{path.name}: {name} is recorded and missing"
                elif digest and _digest(wheel.read(name)) != digest:
                    yield f"{path.name}: {name} has another hash"


def _digest(data: bytes) -> str:
    raw = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return f"sha256={raw.decode().rstrip('=')}"


def _requirements(path: Path) -> list[Requirement]:
    with zipfile.ZipFile(path) as wheel:
        metadata = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        message = Parser().parsestr(wheel.read(metadata).decode(), headersonly=True)
    return [Requirement(line) for line in message.get_all("Requires-Dist") or ()]


def _fits(tag: str, python: str) -> bool:
    interpreter, abi, platform = tag.split("-", 2)
    number = re.fullmatch(r"(?:cp|py)3(\d*)", interpreter)
    if number is None or not (platform == "any" or platform.endswith("x86_64")):
        return False
    minor, most = int(number[1] or 0), int(python.removeprefix("3."))
    return minor <= most and (abi in ("none", "abi3") or minor == most)


def main(argv: list[str]) -> int:
    match argv:
        case ["list"]:
            print("\n".join(missing_packages()))
        case ["slim", folder]:
            for path in sorted(Path(folder).glob("*.whl")):
                slim(path)
        case ["pin", folder]:
            print("\n".join(pins(Path(folder))))
        case ["check", folder, python]:
            wheels = Path(folder)
            faults = [*unmet(wheels, python), *broken_records(wheels)]
            n_bytes = sum(path.stat().st_size for path in wheels.iterdir())
            if n_bytes > MAX_BYTES:
                faults.append(f"{n_bytes / 1e6:.1f} MB, at most {MAX_BYTES / 1e6:.0f}")
            print("\n".join(faults) or f"complete: {n_bytes / 1e6:.1f} MB")
            return 1 if faults else 0
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
