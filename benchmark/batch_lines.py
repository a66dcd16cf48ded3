"""Cost of the Batch API without a model: lines whose requests take no time.

    python -m benchmark.batch_lines --json out.json

Measured are the time of validation, lines per second, the delay of the event loop in both beside
that of an idle one, memory, and the size of the database.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from prometheus_client import CollectorRegistry

from benchmark.load.provenance import facts
from sglang_live.extensions.batches.config import BatchConfig
from sglang_live.extensions.batches.file_store import new_input
from sglang_live.extensions.batches.in_process import Outcome
from sglang_live.extensions.batches.line_run import LineRuns
from sglang_live.extensions.batches.metrics import BatchMetrics
from sglang_live.extensions.batches.pace import Load
from sglang_live.extensions.batches.records import ENDED, VALIDATING, Batch
from sglang_live.extensions.batches.runner import Runner
from sglang_live.extensions.batches.store import Store
from sglang_live.gateway.draining import Drain

_URL = "/v1/audio/speech"
_MIB = 1 << 20


class LoopDelay:
    """How late the event loop is, measured every 5 ms."""

    def __init__(self) -> None:
        self.seen_s: list[float] = []

    async def run(self) -> None:
        while True:
            due_s = time.monotonic() + 0.005
            await asyncio.sleep(0.005)
            self.seen_s.append(time.monotonic() - due_s)

    def summary(self) -> dict[str, float]:
        """Milliseconds since the last summary."""
        ordered, self.seen_s = sorted(self.seen_s), []
        at = [int(q * (len(ordered) - 1)) for q in (0.5, 0.99, 1.0)]
        return dict(
            zip(("p50", "p99", "max"), (round(1000 * ordered[i], 2) for i in at), strict=True)
        )


def input_of(n_lines: int) -> bytes:
    body = {"model": "m", "voice": "anna", "input": "A sentence to be spoken. " * 8}
    lines = (
        {"custom_id": f"request-{n}", "method": "POST", "url": _URL, "body": body}
        for n in range(n_lines)
    )
    return "\n".join(map(json.dumps, lines)).encode()


async def answer(_key: str, _path: str, _body: bytes, _until_s: int) -> Outcome:
    usage = {"input_tokens": 50, "output_tokens": 100, "total_tokens": 150}
    return Outcome(200, {"audio": "A" * 1000, "format": "mp3", "usage": usage})


async def measure(n_lines: int, folder: Path) -> dict[str, Any]:
    process, data = psutil.Process(), input_of(n_lines)
    store = Store(folder, BatchConfig(at_once=8))
    metrics = BatchMetrics(CollectorRegistry())
    runner = Runner(
        store,
        LineRuns(answer, store.config, lambda code: None),
        keys=("k",),
        check_model=lambda name: None,
        load=lambda: Load(n_sessions=0, n_more=64),
        drain=Drain(),
        metrics=metrics,
    )
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        file_id, n_bytes = store.files.write(file)
    owner = store.owner_of("k")
    created_s = int(store.now_s())
    added = new_input(
        file_id, owner=owner, name="x", n_bytes=n_bytes, created_s=created_s, kept_s=10**6
    )
    store.files.add(added)
    del data
    batch = store.batches.create(
        owner=owner, endpoint=_URL, input_file=file_id, metadata=None, results_kept_s=None
    )
    delay, before_bytes = LoopDelay(), process.memory_info().rss
    watching = asyncio.create_task(delay.run())
    await asyncio.sleep(0.5)
    found: dict[str, Any] = {"lines": n_lines, "input_mib": round(n_bytes / _MIB, 1)}
    found["idle_delay_ms"] = delay.summary()
    begun_s = time.monotonic()
    runner.start()
    await until(store, batch, lambda now: now.status != VALIDATING)
    found["validation_s"] = round(time.monotonic() - begun_s, 2)
    found["validation_delay_ms"] = delay.summary()
    begun_s = time.monotonic()
    most_bytes = 0
    while (now := await get(store, batch)).status not in ENDED:
        most_bytes = max(most_bytes, process.memory_info().rss)
        await asyncio.sleep(0.2)
    took_s = time.monotonic() - begun_s
    found["lines_per_s"] = round(n_lines / took_s, 1)
    found["running_delay_ms"] = delay.summary()
    found["memory_mib"] = round((most_bytes - before_bytes) / _MIB, 1)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    found["database_mib"] = round(sum(sizes.values()) / _MIB, 1)
    assert now.n_completed == n_lines, now
    assert now.output_tokens == 100 * n_lines, now
    watching.cancel()
    await runner.close()
    return found


async def get(store: Store, batch: Batch) -> Batch:
    return await store.run(store.batches.get, batch.owner, batch.id)


async def until(store: Store, batch: Batch, claim: Any) -> None:
    while not claim(await get(store, batch)):
        await asyncio.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmark.batch_lines", description=__doc__)
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        found = asyncio.run(measure(args.lines, Path(name)))
    for key, value in found.items():
        print(f"{key:<22}{value}")
    if args.json:
        args.json.write_text(json.dumps(facts() | {"batch": found}, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
