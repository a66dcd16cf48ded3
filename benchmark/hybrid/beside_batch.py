"""Users of a whole server with a full batch queue and without one: first audio, and continuity.

    python -m benchmark.hybrid.beside_batch --users 8 --json out.json

One server, whose users speak, listen and speak again from beginning to end. Blocks of some seconds
follow one another in turn, with no other work and with a batch that has more lines than the server
can serve. A turn belongs to the block in which its user stopped speaking. Blocks of one kind differ
by chance alone.
"""

import asyncio
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmark.hybrid.workload import PARTS, Workload
from benchmark.load.config import LoadConfig, Run
from benchmark.load.device_times import device_times, grown
from benchmark.load.drawn_length_model import drawn_length_model
from benchmark.load.options import read_options
from benchmark.load.point import Workload as Voices
from benchmark.load.provenance import config_of, facts
from benchmark.load.server import ServerProcess
from benchmark.load.user import User
from benchmark.speech_throughput import QUESTIONS
from lab.load_client.options import LoadOptions
from sglang_live.clock import MonotonicClock
from sglang_live.extensions.planner.simulation.load.rows import TurnRow
from sglang_live.extensions.planner.simulation.load.stats import is_useful, percentile

NONE, BATCH = "users alone", "beside a batch"
_ENDPOINT = "/v1/completions"
# After a block its running lines end.
_PAUSE_S = 3.0
_START_TIMEOUT_S = 300.0
# More turns than there will be: the users are stopped.
_MOST_TURNS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One flag per field.

    warm_s: before the first block.
    rounds: blocks of each kind.
    most_tokens: of a line's prompt; longer ones are shortened to the demo's context.
    device_model: file of a device model; empty: this machine.
    """

    users: int = 6
    warm_s: float = 15.0
    rounds: int = 4
    block_s: float = 20.0
    lines: int = 3000
    most_tokens: int = 1024
    policies: str = "all"
    device_model: str = ""
    seed: int = 1
    json: str = ""


@dataclass(slots=True, kw_only=True)
class Block:
    """began_s, ended_s: time of the load. The rest is of the batch: its lines and tokens."""

    kind: str
    began_s: float
    ended_s: float = 0.0
    n_done: int = 0
    n_failed: int = 0
    n_tokens: int = 0

    def has(self, row: TurnRow) -> bool:
        return self.began_s <= row.start_s + row.record.user_audio_s < self.ended_s


@dataclass(slots=True)
class BatchQueue:
    """A server's Batch API."""

    http: aiohttp.ClientSession
    file_id: str = ""

    async def upload(self, lines: str) -> None:
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", lines, filename="lines.jsonl")
        self.file_id = (await self._json("POST", "/v1/files", data=form))["id"]

    async def begin(self) -> str:
        body = {"input_file_id": self.file_id, "endpoint": _ENDPOINT, "completion_window": "24h"}
        return str((await self._json("POST", "/v1/batches", json=body))["id"])

    async def end(self, batch_id: str) -> dict[str, Any]:
        """Cancel it. Returns it as it was then; ends when no line runs any more."""
        found = await self._json("GET", f"/v1/batches/{batch_id}")
        await self._json("POST", f"/v1/batches/{batch_id}/cancel")
        while (await self._json("GET", f"/v1/batches/{batch_id}"))["status"] == "cancelling":
            await asyncio.sleep(0.2)
        return found

    async def _json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        async with self.http.request(method, path, **options) as response:
            found: dict[str, Any] = await response.json()
            if response.status != 200:
                raise RuntimeError(f"{method} {path}: {response.status} {found}")
            return found


def lines_of(options: Options, model: str) -> str:
    """A batch with the lengths of a service's requests."""
    rng = np.random.default_rng(options.seed)
    words = sorted(set(QUESTIONS.read_text("utf-8").split()))
    supply = Workload.load(PARTS[1], "chat").supply(options.seed)
    lines = []
    for number in range(options.lines):
        work = next(supply)
        n_words = min(work.prompt_tokens, options.most_tokens) // 2  # of two tokens at most
        body = {
            "model": model,
            "prompt": " ".join(rng.choice(words, max(1, n_words))),
            "max_tokens": work.output_tokens,
            "ignore_eos": True,
        }
        line = {"custom_id": str(number), "method": "POST", "url": _ENDPOINT, "body": body}
        lines.append(json.dumps(line))
    return "\n".join(lines) + "\n"


@dataclass(slots=True)
class UsersBesideBatch:
    server: ServerProcess
    options: Options
    model: str
    blocks: list[Block] = field(default_factory=list)

    async def run(self) -> list[TurnRow]:
        options, clock = self.options, MonotonicClock()
        config = LoadConfig(
            sessions=(options.users,),
            turns=_MOST_TURNS,
            seed=options.seed,
            drawn_replies=True,
            device_model=Path(options.device_model) if options.device_model else None,
        )
        session = LoadOptions(url=self.server.url, model=self.model, turn_timeout_s=60.0)
        voices = Voices.load(config)
        audio = {**voices.speech, **voices.sounds}
        began_s = clock.now_s()
        plans = voices.plans(config, Run(0, options.users, options.policies))
        users = [User(plan, audio, session, clock) for plan in plans]
        url = f"http://127.0.0.1:{self.server.port}"
        async with aiohttp.ClientSession(url) as http:
            queue = BatchQueue(http)
            await queue.upload(lines_of(options, self.model))
            tasks = [asyncio.create_task(user.run()) for user in users]
            await asyncio.sleep(options.warm_s)
            for n in range(options.rounds):
                for kind in (NONE, BATCH) if n % 2 == 0 else (BATCH, NONE):
                    self.blocks.append(Block(kind=kind, began_s=clock.now_s() - began_s))
                    await self._block(self.blocks[-1], queue)
                    self.blocks[-1].ended_s = clock.now_s() - began_s
                    await asyncio.sleep(_PAUSE_S)
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end
        return [row for user in users for row in user.rows]

    async def _block(self, block: Block, queue: BatchQueue) -> None:
        if block.kind == NONE:
            await asyncio.sleep(self.options.block_s)
            return
        batch_id = await queue.begin()
        await asyncio.sleep(self.options.block_s)
        batch = await queue.end(batch_id)
        counts, usage = batch["request_counts"], batch["usage"]
        block.n_done, block.n_failed = counts["completed"], counts["failed"]
        block.n_tokens = usage["input_tokens"] + usage["output_tokens"]
        if counts["completed"] + counts["failed"] >= counts["total"]:
            raise RuntimeError("the batch ended before its block: give it more --lines")


def summary(name: str, blocks: list[Block], rows: list[TurnRow]) -> dict[str, Any]:
    turns = [row.record for row in rows if any(block.has(row) for block in blocks)]
    first_ms = [ms for turn in turns if (ms := turn.ttfp_after_detection_ms) is not None]
    smooth = [not turn.gaps_over_100ms for turn in turns]
    seconds = sum(block.ended_s - block.began_s for block in blocks)
    return {
        "arm": name,
        "n": len(turns),
        "n_failed_turns": sum(not turn.ok for turn in turns),
        "first_audio_p50_ms": percentile(first_ms, 50),
        "first_audio_p90_ms": percentile(first_ms, 90),
        "useful": round(float(np.mean([is_useful(t) for t in turns])), 4) if turns else None,
        "continuous": round(float(np.mean(smooth)), 4) if turns else None,
        "batch_lines": sum(block.n_done for block in blocks),
        "batch_failed": sum(block.n_failed for block in blocks),
        "batch_tokens_per_s": round(sum(block.n_tokens for block in blocks) / seconds, 1),
    }


def summaries(blocks: list[Block], rows: list[TurnRow]) -> list[dict[str, Any]]:
    """Of each kind, and of each block: blocks of one kind differ by chance."""
    of_kind = [summary(k, [b for b in blocks if b.kind == k], rows) for k in (NONE, BATCH)]
    each = [summary(f"{b.kind}, block {n}", [b], rows) for n, b in enumerate(blocks)]
    return of_kind + each


def main() -> None:
    options = read_options(Options(), __doc__)
    device = Path(options.device_model) if options.device_model else None
    known = facts(device)
    model_path = drawn_length_model(shallow=device is not None)
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--batch-dir={folder}", f"--max-sessions={options.users + 4}"]
        flags += [f"--device-model={device}"] if device is not None else []
        with ServerProcess(
            str(model_path), options.policies, tuple(flags), _START_TIMEOUT_S
        ) as server:
            before = device_times(server.metrics())
            load = UsersBesideBatch(server, options, model_path.name)
            rows = asyncio.run(load.run())
            times = grown(before, device_times(server.metrics()))
    found = summaries(load.blocks, rows)
    for row in found:
        print(json.dumps(row), flush=True)
    if options.json:
        blocks = [{n: getattr(block, n) for n in Block.__slots__} for block in load.blocks]
        document = known | {
            "benchmark": "hybrid_beside_batch",
            "config": config_of(options),
            "blocks": blocks,
            "device_times": times,
            "summary": found,
            "turns": [row.to_json() for row in rows],
        }
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
