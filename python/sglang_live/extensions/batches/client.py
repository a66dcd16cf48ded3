"""Run a batch from a shell: `python -m sglang_live.extensions.batches FILE.jsonl`.

In: a file of requests, a server's address and a key. Out: files with the results. A server that
does not answer is asked again: its batches outlive it.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import aiohttp

_RETRY_S = 2.0
_RETRIED = (429, 502, 503, 504)
_READ_BYTES = 1 << 18
API_KEY_VARIABLE = "SGLANG_LIVE_API_KEY"
_BAR_CHARS = 24
_PAUSES = {
    "storage_full": "the server's disk is full",
    "key_storage_full": "this key's files are too large: delete some",
}
_ENDED = ("completed", "failed", "expired", "cancelled")


class BatchError(Exception):
    """The server refused a request; the message is that of the server."""


class Api:
    """offline: called with a reason each time that the server does not serve a request."""

    def __init__(self, url: str, key: str | None, offline: Callable[[str], None]):
        self._url = url
        self._offline = offline
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # Uploads and results may be large; a connection that stands still ends.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=120)
        self._http = aiohttp.ClientSession(headers=headers, timeout=timeout)

    async def __aenter__(self) -> "Api":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def create(self, file: Path, endpoint: str) -> dict[str, Any]:
        """Upload a file and make its batch. Not repeated: it could be made twice."""
        try:
            with file.open("rb") as content:
                form = aiohttp.FormData({"purpose": "batch"})
                form.add_field("file", content, filename=file.name)
                uploaded = await self._json("POST", "/v1/files", data=form)
            body = {
                "input_file_id": uploaded["id"],
                "endpoint": endpoint,
                "completion_window": "24h",
            }
            return await self._json("POST", "/v1/batches", json=body)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BatchError(f"cannot reach {self._url}: {error or type(error).__name__}") from None

    async def batch(self, batch_id: str) -> dict[str, Any]:
        while True:
            try:
                return await self._json("GET", f"/v1/batches/{batch_id}")
            except (aiohttp.ClientError, TimeoutError) as error:
                self._offline(str(error) or type(error).__name__)
                await asyncio.sleep(_RETRY_S)

    async def save(self, file_id: str, path: Path) -> None:
        """Write the content of a file. `path` is complete or unchanged."""
        part = path.with_name(path.name + ".part")
        while True:
            try:
                await self._download(file_id, part)
                break
            except (aiohttp.ClientError, TimeoutError) as error:
                self._offline(str(error) or type(error).__name__)
                await asyncio.sleep(_RETRY_S)
        os.replace(part, path)

    async def _download(self, file_id: str, path: Path) -> None:
        async with self._http.get(f"{self._url}/v1/files/{file_id}/content") as response:
            await _check(response)
            with path.open("wb") as file:
                async for piece in response.content.iter_chunked(_READ_BYTES):
                    file.write(piece)

    async def _json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        async with self._http.request(method, self._url + path, **options) as response:
            await _check(response)
            found: dict[str, Any] = await response.json()
            return found


async def _check(response: aiohttp.ClientResponse) -> None:
    """
    Raises:
        BatchError: the server refused the request.
        aiohttp.ClientError: it cannot serve it now.
    """
    if response.status < 400:
        return
    if response.status in _RETRIED and response.method == "GET":
        response.raise_for_status()
    text = await response.text()
    try:
        text = (await response.json())["error"]["message"]
    except (aiohttp.ClientError, ValueError, KeyError, TypeError):
        text = text[:300]
    raise BatchError(f"HTTP {response.status}: {text}")


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
        prog="python -m sglang_live.extensions.batches",
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


class Progress:
    """On a terminal: one line that is rewritten; elsewhere a new line for each change."""

    def __init__(self, out: TextIO = sys.stderr, now_s: Callable[[], float] = time.monotonic):
        self._out = out
        self._now_s = now_s
        self._rewrites = out.isatty()
        self._begun_s: float | None = None  # of the first look at running requests
        self._n_at_begin = 0
        self._latest = ""
        self._width = 0

    def show(self, batch: dict[str, Any]) -> None:
        """batch: as the server describes it."""
        self._write(self._line(batch))

    def offline(self, reason: str) -> None:
        self._write(f"waiting for the server ({reason})")

    def end(self) -> None:
        if self._rewrites and self._latest:
            self._out.write("\n")
        self._latest = ""

    def _line(self, batch: dict[str, Any]) -> str:
        counts = batch["request_counts"]
        n_done, total = counts["completed"] + counts["failed"], counts["total"]
        line = f"{batch['status']:<11}"
        if total:
            n_full = _BAR_CHARS * n_done // total
            line += f" [{'#' * n_full}{'.' * (_BAR_CHARS - n_full)}] {n_done}/{total}"
        if counts["failed"]:
            line += f", {counts['failed']} failed"
        if pause := _PAUSES.get(batch.get("paused") or ""):
            return f"{line}, paused: {pause}"
        return line + self._left(n_done, total) if batch["status"] == "in_progress" else line

    def _left(self, n_done: int, total: int) -> str:
        now_s = self._now_s()
        if self._begun_s is None:
            self._begun_s = now_s
            self._n_at_begin = n_done
        n_seen, took_s = n_done - self._n_at_begin, now_s - self._begun_s
        if n_seen < 1 or took_s <= 0:
            return ""
        left_s = round((total - n_done) * took_s / n_seen)
        return f", {left_s // 3600}:{left_s // 60 % 60:02}:{left_s % 60:02} left"

    def _write(self, line: str) -> None:
        if line == self._latest:
            return
        if self._rewrites:
            self._out.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._out.write(line + "\n")
        self._out.flush()
        self._latest = line


async def run(config: BatchRun, progress: Progress) -> bool:
    """Returns True if every request succeeded. Raises BatchError."""
    async with Api(config.url, config.api_key, progress.offline) as api:
        if config.file is not None:
            _say(f"uploading {config.file} ({config.file.stat().st_size:,} bytes)")
            batch = await api.create(config.file, config.endpoint)
            _say(f"batch {batch['id']}; to go on later: --id {batch['id']} --out {config.out}")
        else:
            assert config.batch_id is not None, "BatchRun has a file or an id"
            batch = await api.batch(config.batch_id)
        try:
            progress.show(batch)
            while batch["status"] not in _ENDED:
                await asyncio.sleep(config.poll_s)
                batch = await api.batch(batch["id"])
                progress.show(batch)
        finally:
            progress.end()
        for fault in (batch["errors"] or {}).get("data", ()):
            _say(f"line {fault['line']}: {fault['message']}")
        for name, path in (("output_file_id", config.out), ("error_file_id", config.errors)):
            if batch[name]:
                await api.save(batch[name], path)
                _say(f"wrote {path}")
        return batch["status"] == "completed" and not batch["request_counts"]["failed"]


def main(argv: list[str] | None = None) -> int:
    config = parse_args(argv)
    try:
        return 0 if asyncio.run(run(config, Progress())) else 1
    except (BatchError, OSError) as error:
        _say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        _say("interrupted; the batch goes on in the server")
        return 130


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
