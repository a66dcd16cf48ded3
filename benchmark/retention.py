"""Long sessions on a running engine: memory and time per turn over age, bounded and not.

    python -m benchmark.retention --turns 60 --json out.json

Sessions take their turns in order, over SGLang's own API of a thinker. With a bound, a session
keeps its first tokens and a window of the last ones; without, everything. Both arms run in one
engine, one after the other. The cost of a compaction is the scheduler's own time in it, without
waiting for the device.
"""

import argparse
import asyncio
import json
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import numpy as np

from benchmark.load.provenance import config_of, facts
from benchmark.native_client import native_client
from benchmark.thinker import load_of, spent, thinker
from sglang_live.engine_channel.messages import RetainSession
from sglang_live.stages.engine_host import FeedSocket

POLICIES = ("urgency", "pacing", "truncate", "retention")
ARMS = ("everything", "bounded")


@dataclass(frozen=True, kw_only=True)
class Options:
    """One flag per field; lengths in tokens."""

    calls: int = 4
    turns: int = 60
    heard: int = 50
    said: int = 20
    sink: int = 32
    window: int = 512
    slack: int = 128
    page: int = 16
    seed: int = 1
    json: str = ""


class RetainedSession:
    def __init__(self, name: str, replica, client: httpx.AsyncClient, options: Options):
        self._name, self._client, self._options = name, client, options
        self._rng = random.Random(f"{options.seed} {name}")

    async def open(self, feed: FeedSocket | None) -> None:
        body = {"capacity_of_str_len": 1 << 40, "session_id": self._name, "streaming": True}
        (await self._client.post("/open_session", json=body)).raise_for_status()
        if feed is not None:
            o = self._options
            feed.send(RetainSession(self._name, o.sink, o.window, o.slack, every_request=True))
            await asyncio.sleep(0.1)

    async def turn(self) -> float:
        """Run one turn. Returns its duration in seconds."""
        body = {
            "input_ids": [self._rng.randrange(10, 200) for _ in range(self._options.heard)],
            "session_params": {"id": self._name},
            "sampling_params": {
                "max_new_tokens": self._options.said,
                "temperature": 0,
                "ignore_eos": True,
            },
        }
        began_s = time.monotonic()
        (await self._client.post("/generate", json=body)).raise_for_status()
        return time.monotonic() - began_s

    async def close(self) -> None:
        body = {"session_id": self._name}
        (await self._client.post("/close_session", json=body)).raise_for_status()


async def measure(arm: str, replica, options: Options) -> dict:
    feed = FeedSocket(replica.spec.socket_path("inbox")) if arm == "bounded" else None
    before = await load_of(replica)
    ages: list[dict[str, float]] = []
    async with native_client(replica.spec, 120) as client:
        sessions = [
            RetainedSession(f"{arm}-{n}", replica, client, options) for n in range(options.calls)
        ]
        for session in sessions:
            await session.open(feed)
        for turn in range(options.turns):
            seconds = [await session.turn() for session in sessions]
            if (turn + 1) % max(1, options.turns // 12) == 0:
                used = (await load_of(replica))["kv_tokens_used"] - before["kv_tokens_used"]
                ages.append(
                    {
                        "turn": turn + 1,
                        "tokens_talked": (turn + 1) * (options.heard + options.said),
                        "kv_tokens_per_call": used / options.calls,
                        "turn_ms": 1000 * float(np.median(seconds)),
                    }
                )
        after = await load_of(replica)
        for session in sessions:
            await session.close()
    grown = spent(before, after)
    n_compactions = grown["sessions_compacted"] + grown["sessions_compacted_running"]
    return {
        "arm": arm,
        "ages": ages,
        "cuts": n_compactions,
        "cut_ms": 1000 * grown["compact_s"] / n_compactions if n_compactions else 0.0,
        "tokens_compacted": grown["tokens_compacted"],
        "rebases": grown["sessions_rebased"],
    }


async def run(options: Options) -> list[dict]:
    rows = []
    async with thinker(POLICIES, {"page_size": options.page}) as replica:
        for arm in ARMS:
            rows.append(await measure(arm, replica, options))
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
            f"held {age['kv_tokens_per_call']:7.0f}  a turn takes {age['turn_ms']:6.0f} ms",
            flush=True,
        )


def parse_args() -> Options:
    parser = argparse.ArgumentParser(
        prog="benchmark.retention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, default in asdict(Options()).items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(default), default=default)
    return Options(**vars(parser.parse_args()))


def main() -> None:
    options = parse_args()
    rows = asyncio.run(run(options))
    if options.json:
        document = {"benchmark": "retention", **facts(), "config": config_of(options), "rows": rows}
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
