#!/usr/bin/env python3
"""List every seam into SGLang, and compare seams and used private names with the installed SGLang.

    python scripts/check_seams.py [--json | --markdown]

Exit status 1 if a target is gone or has another signature than its seam expects, or if a name of
lab/upstream/names.py is gone or takes other parameters.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import pkgutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_live.bridge.seams import Seam, all_seams, upstream_signature
from sglang_live.errors import SeamError

sys.path.append(str(Path(__file__).parents[1]))  # lab/ is not installed
from lab.upstream.comparison import differences
from lab.upstream.names import NAMES

OK, MISMATCH, NOT_CHECKED = "OK", "MISMATCH", "not checked"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table of seams.

    Attributes:
        detail: the difference, or why nothing was compared.
    """

    name: str
    target: str
    kind: str
    stages: str
    only_on: str
    why: str
    drop_when: str
    status: str
    detail: str


def check(seam: Seam) -> Row:
    status, detail = _verdict(seam)
    return Row(
        name=seam.name,
        target=seam.target,
        kind=seam.kind,
        stages="all" if "*" in seam.stages else ", ".join(seam.stages),
        only_on=_only_on(seam),
        why=seam.why,
        drop_when=seam.drop_when,
        status=status,
        detail=detail,
    )


def _only_on(seam: Seam) -> str:
    if not seam.cpu_only:
        return ""
    return "CPU, CUDA without sgl-kernel" if seam.cuda_native else "CPU"


def _verdict(seam: Seam) -> tuple[str, str]:
    if importlib.util.find_spec(seam.target.partition(".")[0]) is None:
        return NOT_CHECKED, "SGLang is not installed"
    try:
        found = upstream_signature(seam)
        if seam.kind == "item":
            pkgutil.resolve_name(seam.target)
    except (SeamError, ImportError, AttributeError) as error:
        return MISMATCH, str(error)
    if seam.signature is None:
        return NOT_CHECKED, f"kind {seam.kind} has no signature; its target in SGLang exists"
    if found != seam.signature:
        return MISMATCH, f"found {found}, expected {seam.signature}"
    return OK, ""


def changed_names() -> list[str]:
    """How the used private names differ from the installed SGLang."""
    if importlib.util.find_spec("sglang") is None:
        return []
    return [difference for names in NAMES for difference in differences(names)]


def text(rows: list[Row]) -> str:
    form = "{:24} {:12} {:8} {:14} {}"
    lines = [form.format("SEAM", "SIGNATURE", "KIND", "STAGES", "ONLY ON")]
    for row in rows:
        lines += [
            form.format(row.name, row.status, row.kind, row.stages, row.only_on),
            f"    target     {row.target}",
            f"    why        {row.why}",
            f"    drop when  {row.drop_when}",
        ]
        if row.detail:
            lines.append(f"    signature  {row.detail}")
    return "\n".join(lines)


def markdown(rows: list[Row]) -> str:
    lines = [
        "| seam | target in `sglang.srt` | kind | stages | only on | why | drop when | state |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (
            row.name,
            f"`{row.target.removeprefix('sglang.srt.')}`",
            row.kind,
            row.stages,
            row.only_on,
            row.why,
            row.drop_when,
            row.status,
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON document")
    form.add_argument("--markdown", action="store_true", help="the table of sgl_patches/README.md")
    args = parser.parse_args(argv)
    rows, changed = [check(seam) for seam in all_seams()], changed_names()
    version = _sglang_version()
    if args.json:
        seams = [asdict(row) for row in rows]
        document = {"sglang": version, "seams": seams, "changed_names": changed}
        print(json.dumps(document, indent=2))
    elif args.markdown:
        print(markdown(rows))
    else:
        n_bad = sum(row.status == MISMATCH for row in rows)
        print(text(rows))
        for line in changed:
            print(f"CHANGED  {line}")
        print(
            f"\nSGLang {version or 'not installed'}: {len(rows)} seams, {n_bad} mismatched; ",
            end="",
        )
        print(f"{len(changed)} used names changed")
    return int(bool(changed) or any(row.status == MISMATCH for row in rows))


def _sglang_version() -> str | None:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
