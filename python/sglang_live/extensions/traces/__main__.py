"""Send timelines of sessions to a collector of traces, and delete what was sent.

python -m sglang_live.extensions.traces TIMELINES --endpoint http://collector:4318/v1/traces

TIMELINES is the folder of a server's --timeline-dir. One that cannot be sent stays, and is sent
later.
"""

import argparse
import json
import logging
import socket
import sys
import time
import urllib.request
from pathlib import Path

from sglang_live.environment import start_in_utf8_mode
from sglang_live.extensions.traces.spans import export
from sglang_live.telemetry.log_lines import log_in_lines

log = logging.getLogger(__name__)

_TIMEOUT_S = 10.0


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "sglang_live.extensions.traces",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="TIMELINES")
    add("--endpoint", required=True, metavar="URL", help="OTLP over HTTP, such as …/v1/traces")
    add("--header", action="append", default=[], metavar="NAME=VALUE", help="repeatable")
    add("--once", action="store_true", help="send what is there, and end: 1 if some is left")
    add("--every-s", type=float, default=2.0, metavar="S", help="default: %(default)s")
    args = parser.parse_args(argv)
    if not args.folder.is_dir():
        parser.error(f"no such folder: {args.folder}")
    if not args.endpoint.startswith(("http://", "https://")):
        parser.error(f"--endpoint takes an http or https URL, got {args.endpoint}")
    if wrong := [one for one in args.header if "=" not in one]:
        parser.error(f"--header takes NAME=VALUE, got {wrong[0]}")
    return args


def send(folder: Path, endpoint: str, headers: dict[str, str]) -> int:
    """Send all timelines of a folder, and delete what was sent. Returns how many are left."""
    n_left = 0
    for path in sorted(folder.glob("*.json")):
        try:
            body = json.dumps(export(json.loads(path.read_text("utf-8")), socket.gethostname()))
        except json.JSONDecodeError:
            n_left += 1  # its server still writes it
            continue
        request = urllib.request.Request(
            endpoint, body.encode(), {"Content-Type": "application/json", **headers}
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
                path.unlink()
        except OSError as error:  # also an answer that is an error
            n_left += 1
            log.warning("trace_not_sent session=%s error=%s", path.stem, error)
    return n_left


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    log_in_lines("")
    headers = dict(one.split("=", 1) for one in args.header)
    while True:
        n_left = send(args.folder, args.endpoint, headers)
        if args.once:
            return int(n_left > 0)
        time.sleep(args.every_s)


if __name__ == "__main__":
    start_in_utf8_mode()
    sys.exit(main())
