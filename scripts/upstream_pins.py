#!/usr/bin/env python3
"""Compare what another SGLang requires with the pinned SGLang, and with this repository's pins.

    python scripts/upstream_pins.py BEFORE AFTER requirements/cpu.txt …

BEFORE and AFTER are METADATA files of the two SGLangs. Prints lines of three kinds:

    INSTALL  name==2   a pinned package of which AFTER requires another version
    KEEP     name==2   likewise, but of PyTorch, whose CPU builds have versions of their own
    NEW      name==2   a requirement that BEFORE does not have and no file pins
"""

import sys
from collections.abc import Iterable
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYTORCH = {"torch", "torchvision", "torchaudio", "torchcodec"}


def pins_of(texts: Iterable[str]) -> dict[str, str]:
    """Version by canonical name, from lines `name==version`."""
    pins = {}
    for line in "\n".join(texts).splitlines():
        name, found, version = line.partition("==")
        if found and not line.startswith("#"):
            pins[canonicalize_name(name.strip())] = version.strip()
    return pins


def requirements_of(metadata: str) -> dict[str, Requirement]:
    """Requirements for this platform, without extras, by canonical name."""
    texts = HeaderParser().parsestr(metadata).get_all("Requires-Dist", [])
    found = {}
    for requirement in map(Requirement, texts):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found[canonicalize_name(requirement.name)] = requirement
    return found


def differences(
    before: dict[str, Requirement], after: dict[str, Requirement], pins: dict[str, str]
) -> list[str]:
    lines = []
    for name, requirement in after.items():
        required = f"{requirement.name}{requirement.specifier}"
        if name in pins:
            if not requirement.specifier.contains(pins[name], prereleases=True):
                lines.append(f"{'KEEP' if name in PYTORCH else 'INSTALL':8} {required}")
        elif name not in before:
            lines.append(f"{'NEW':8} {required}")
    return sorted(lines)


def main(argv: list[str]) -> int:
    before, after = (requirements_of(Path(name).read_text("utf-8")) for name in argv[:2])
    for line in differences(
        before, after, pins_of(Path(name).read_text("utf-8") for name in argv[2:])
    ):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
