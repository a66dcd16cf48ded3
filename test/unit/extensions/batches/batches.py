"""A store with one batch, and a gateway that serves a store, for tests."""

import io
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from sglang_live.extensions.batches.api import BatchApi
from sglang_live.extensions.batches.config import BatchConfig
from sglang_live.extensions.batches.file_store import new_input
from sglang_live.extensions.batches.records import Batch, File, Line, Result
from sglang_live.extensions.batches.store import Store
from test.unit.gateway.fakes import FakeOrchestrator, app_of

URL = "/v1/audio/speech"
SPEECH = {"input": "Hi.", "voice": "ada", "response_format": "pcm"}


class FakeTime:
    """Unix time, as a store reads it."""

    def __init__(self):
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def input_of(custom_ids: Iterable[str], url: str = URL, body: dict | None = None) -> bytes:
    lines = [
        {"custom_id": custom_id, "method": "POST", "url": url, "body": body or SPEECH}
        for custom_id in custom_ids
    ]
    return "\n".join(map(json.dumps, lines)).encode()


def uploaded(store: Store, owner: str, data: bytes, kept_s: int = 10_000_000) -> File:
    file_id, n_bytes = store.files.write(io.BytesIO(data))
    file = new_input(
        file_id, owner=owner, name="x", n_bytes=n_bytes, created_s=int(store.now_s()), kept_s=kept_s
    )
    store.files.add(file)
    return file


def created(store: Store, owner: str = "o", n_lines: int = 4) -> Batch:
    """A batch in progress."""
    data = input_of(str(n) for n in range(1, n_lines + 1))
    batch = store.batches.create(
        owner=owner,
        endpoint=URL,
        input_file=uploaded(store, owner, data).id,
        metadata=None,
        results_kept_s=None,
    )
    lines = [Line(n=n, custom_id=str(n), at=0, n_bytes=1) for n in range(1, n_lines + 1)]
    store.batches.begin(batch.id, lines)
    return store.batches.get(owner, batch.id)


def result(n: int, succeeded: bool = True) -> Result:
    return Result(n=n, succeeded=succeeded, text=b'{"n":%d}\n' % n)


def results_in(store: Store, file_id: str) -> list[int]:
    text = store.files.path(file_id).read_bytes()
    assert not text or text.endswith(b"\n")
    return [json.loads(line)["n"] for line in text.splitlines()]


def opened(folder: Path, now_s: FakeTime | None = None, **config) -> Store:
    return Store(folder, BatchConfig(**config), now_s or FakeTime())


def app_with(orchestrator: FakeOrchestrator, store: Store, **config: Any) -> Starlette:
    """A gateway with the Batch API. It closes the store."""
    return app_of(orchestrator, additions=[partial(BatchApi, store)], **config)
