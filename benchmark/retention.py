"""Long sessions on a running engine: memory and time per turn over age, bounded and not.

    python -m benchmark.retention --turns 60 --json out.json
    python -m benchmark.retention --model-path cascade --calls 1 --turns 120 --heard 48 --said 4 \
        --more-windows 1024,2048

Sessions take their turns in order, over SGLang's own API of a thinker. In the arm `bounded` a
session keeps its first tokens and a window of the last ones; in `everything` all of them. In
`again` the application keeps the same tokens: when the window is exceeded by the slack, it opens
another session and sends them again. The arms run in one engine, one after the other. The cost of
a compaction is the scheduler's own time in it, without waiting for the device.
"""

import asyncio
import json
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import numpy as np

from benchmark.load.options import read_options
from benchmark.load.provenance import config_of, facts
from benchmark.native_client import native_client
from benchmark.thinker import load_of, spent, thinker
from sglang_live.environment import cache_directory
from sglang_live.messages import RetainSession
from sglang_live.model_source import ModelSource
from sglang_live.stages.engine_link import FeedSocket

POLICIES = ("urgency", "pacing", "truncate", "retention")
ARMS = ("everything", "bounded", "again")
# Tokens of ordinary text in every vocabulary.
FIRST_ID, LAST_ID = 10, 200
AGES = 12


@dataclass(frozen=True, kw_only=True)
class Options:
    """One flag per field; lengths in tokens.

    model_path: "demo", or "cascade".
    more_windows: arms beside `bounded`, each with another window and a slack in proportion.
    """

    model_path: str = "demo"
    calls: int = 4
    turns: int = 60
    heard: int = 50
    said: int = 20
    sink: int = 32
    window: int = 512
    more_windows: str = ""
    slack: int = 128
    page: int = 16
    seed: int = 1
    json: str = ""


class RetainedSession:
    def __init__(
        self, arm: str, name: str, number: int, client: httpx.AsyncClient, options: Options
    ):
        self._arm, self._client, self._options = arm, client, options
        self._rng = random.Random(f"{options.seed} {number}")
        self._prefix, self._opened = f"{name}-{number}".replace(" ", "-"), 0
        self._ids: list[int] = []

    @property
    def _name(self) -> str:
        return f"{self._prefix}-{self._opened}"

    async def open(self, feed: FeedSocket) -> None:
        self._opened += 1
        body = {"capacity_of_str_len": 1 << 40, "session_id": self._name, "streaming": True}
        (await self._client.post("/open_session", json=body)).raise_for_status()
        if self._arm == "bounded":
            o = self._options
            feed.send(RetainSession(self._name, o.sink, o.window, o.slack, every_request=True))
            await asyncio.sleep(0.1)

    async def turn(self, feed: FeedSocket) -> float:
        """Run one turn. Returns its duration in seconds."""
        heard = [self._rng.randrange(FIRST_ID, LAST_ID) for _ in range(self._options.heard)]
        began_s = time.monotonic()
        if self._arm == "again" and len(self._ids) >= self._most_tokens:
            await self.close()
            await self.open(feed)
            o = self._options
            self._ids = self._ids[: o.sink] + self._ids[-o.window :]
            said = await self._generate(self._ids + heard)
        else:
            said = await self._generate(heard)
        self._ids += heard + said
        return time.monotonic() - began_s

    @property
    def _most_tokens(self) -> int:
        o = self._options
        return o.sink + o.window + o.slack

    async def _generate(self, ids: list[int]) -> list[int]:
        body = {
            "input_ids": ids,
            "session_params": {"id": self._name},
            "sampling_params": {
                "max_new_tokens": self._options.said,
                "temperature": 0,
                "ignore_eos": True,
            },
        }
        answer = (await self._client.post("/generate", json=body)).raise_for_status()
        said: list[int] = answer.json()["output_ids"]
        return said

    async def close(self) -> None:
        body = {"session_id": self._name}
        (await self._client.post("/close_session", json=body)).raise_for_status()


async def measure(arm: str, name: str, replica, options: Options) -> dict:
    feed = FeedSocket(replica.spec.socket_path("inbox"))
    before = await load_of(replica)
    ages: list[dict[str, float]] = []
    every = max(1, options.turns // AGES)
    async with native_client(replica.spec, 120) as client:
        sessions = [RetainedSession(arm, name, n, client, options) for n in range(options.calls)]
        for session in sessions:
            await session.open(feed)
        seconds: list[float] = []
        for turn in range(options.turns):
            seconds += [await session.turn(feed) for session in sessions]
            if (turn + 1) % every == 0:
                used = (await load_of(replica))["kv_tokens_used"] - before["kv_tokens_used"]
                ages.append(_age(turn + 1, used, seconds, options))
                seconds = []
        after = await load_of(replica)
        for session in sessions:
            await session.close()
    grown = spent(before, after)
    n_compactions = grown["sessions_compacted"] + grown["sessions_compacted_running"]
    return {
        "arm": name,
        "ages": ages,
        "cuts": n_compactions,
        "cut_ms": 1000 * grown["compact_s"] / n_compactions if n_compactions else 0.0,
        "tokens_compacted": grown["tokens_compacted"],
        "rebases": grown["sessions_rebased"],
    }


def _age(turn: int, kv_tokens: float, seconds: list[float], options: Options) -> dict[str, float]:
    """seconds: of all turns since the age before."""
    return {
        "turn": turn,
        "tokens_talked": turn * (options.heard + options.said),
        "kv_tokens_per_call": kv_tokens / options.calls,
        "turn_ms": 1000 * float(np.median(seconds)),
        "turn_p90_ms": 1000 * float(np.percentile(seconds, 90)),
    }


async def run(options: Options) -> list[dict]:
    rows = []
    model = None
    if options.model_path != "demo":
        model = ModelSource(path=options.model_path).load(cache_directory())
    async with thinker(POLICIES, {"page_size": options.page}, model=model) as replica:
        for arm in ARMS:
            rows.append(await measure(arm, arm, replica, options))
            _print(rows[-1])
        for window in filter(None, options.more_windows.split(",")):
            slack = options.slack * int(window) // options.window
            other = replace(options, window=int(window), slack=slack)
            rows.append(await measure("bounded", f"bounded {window}", replica, other))
            _print(rows[-1])
    return rows


def _print(row: dict) -> None:
    print(
        f"{row['arm']}: {row['cuts']:.0f} cuts of {row['cut_ms']:.2f} ms, "
        f"{row['rebases']:.0f} rebases"
    )
    for age in row["ages"]:
        print(
            f"  turn {age['turn']:4d}  talked {age['tokens_talked']:6d} tokens  "
            f"held {age['kv_tokens_per_call']:7.0f}  a turn takes {age['turn_ms']:6.0f} ms, "
            f"P90 {age['turn_p90_ms']:.0f}",
            flush=True,
        )


def main() -> None:
    options = read_options(Options(), __doc__)
    rows = asyncio.run(run(options))
    if options.json:
        document = {"benchmark": "retention", **facts(), "config": config_of(options), "rows": rows}
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
