"""Flags of the command; this file alone reads argv and the environment."""

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path

API_KEY_VARIABLE = "SGLANG_LIVE_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRun:
    """
    file: input; None: batch_id is that of a batch that exists.
    endpoint: `url` of the lines.
    out, errors: files for the results; errors exists only if there are some.
    """

    url: str
    api_key: str | None
    file: Path | None
    batch_id: str | None
    endpoint: str
    out: Path
    errors: Path
    poll_s: float

    def __post_init__(self) -> None:
        if (self.file is None) == (self.batch_id is None):
            raise ValueError("give a FILE, or --id of a batch that exists")
        if not self.out.parent.is_dir():
            raise ValueError(f"no such folder: {self.out.parent}")
        if self.poll_s <= 0:
            raise ValueError("--poll-s must be positive")


def parse_args(argv: list[str] | None = None) -> BatchRun:
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        out = args.out or _beside(args.file or Path(args.id or "batch"), ".results.jsonl")
        return BatchRun(
            url=args.url.rstrip("/").removesuffix("/v1"),
            api_key=args.api_key or os.environ.get(API_KEY_VARIABLE),
            file=args.file,
            batch_id=args.id,
            endpoint=endpoint_of(args.file) if args.file else "",
            out=out,
            errors=_beside(out, ".errors.jsonl"),
            poll_s=args.poll_s,
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))


def endpoint_of(file: Path) -> str:
    """The `url` of the first line. Raises ValueError if there is none."""
    with file.open("rb") as lines:
        first = next((line for line in lines if line.strip()), b"")
    try:
        endpoint = json.loads(first.decode("utf-8-sig"))["url"]
    except (ValueError, TypeError, KeyError):
        endpoint = None
    if not isinstance(endpoint, str):
        raise ValueError(f"{file}: its first line is no request with a 'url'")
    return endpoint


def _beside(path: Path, suffix: str) -> Path:
    name = path.name.removesuffix(".jsonl").removesuffix(".results")
    return path.with_name(name + suffix)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_live.batch",
        description="Run a file of requests through a server's Batch API and write the results. "
        "Exit code 0: every request succeeded; 1: one did not; 2: wrong arguments.",
    )
    add = parser.add_argument
    add("file", nargs="?", type=Path, metavar="FILE.jsonl", help="one request in each line")
    add("--id", help="go on waiting for a batch that exists, instead of a FILE")
    add("--url", default="http://127.0.0.1:30000", help="default: %(default)s")
    add("--api-key", help=f"default: ${API_KEY_VARIABLE}")
    add(
        "--out",
        type=Path,
        help="file for the results (default: FILE.results.jsonl); those of failed requests go to "
        "FILE.errors.jsonl",
    )
    add(
        "--poll-s", type=float, default=2.0, help="seconds between two looks (default: %(default)g)"
    )
    return parser
