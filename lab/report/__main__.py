"""`python -m lab.report FILE.json`: draw a session's timeline or a benchmark's results."""

import argparse
import sys
from pathlib import Path

from lab.report.documents import (
    Admission,
    Collapse,
    DocumentError,
    LoadDocument,
    Timeline,
    read,
)
from sglang_live.environment import start_in_utf8_mode

NO_MATPLOTLIB = (
    "drawing needs matplotlib: run scripts/setup.sh --bench, or pip install 'sglang-live[bench]'"
)
FORMATS = (".png", ".svg")


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    out = args.out or args.document.with_suffix(".png")
    if out.suffix not in FORMATS:
        return _fail(f"--out ends in {out.suffix or 'nothing'}; it must end in .png or .svg")
    if not out.parent.is_dir():
        return _fail(f"no such folder: {out.parent}")
    try:
        document = read(args.document)
    except DocumentError as error:
        return _fail(str(error))
    try:
        import matplotlib
    except ImportError:
        return _fail(NO_MATPLOTLIB)
    matplotlib.use("Agg")
    # These modules import matplotlib.
    from lab.report import frames_figure, kv_figure, load_figure, timeline_figure

    match document:
        case Timeline():
            timeline_figure.save(document, out)
        case LoadDocument():
            load_figure.save(document, out)
        case Collapse() | Admission():
            frames_figure.save(document, out)
        case _:
            kv_figure.save(document, out)
    print(f"wrote {out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lab.report",
        description="Draw a session timeline, or the document of benchmark.voice_load, "
        "kv_pressure, retention, collapse or admission; the file's contents tell which. Exit code "
        "2: it cannot be drawn.",
    )
    parser.add_argument("document", type=Path, metavar="FILE.json")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.png|svg", help="default: the document's name with .png"
    )
    return parser


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    start_in_utf8_mode()
    sys.exit(main())
