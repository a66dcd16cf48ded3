"""Speech and best-effort work on a real server: what listeners notice, and what work gets done.

    python -m benchmark.hybrid.on_engine --users 6 --json out.json

One server, whose users speak, listen and speak again from beginning to end. Blocks of some seconds
follow one another in turn: without other work; with a full queue of written requests of tier flex;
and with the same requests in the ordinary way, which the server's policies serve as they come.
Before and after the users the same work runs alone. A turn belongs to the block in which its user
stopped speaking.
"""

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmark.hybrid.workload import Workload
from benchmark.load.config import LoadConfig, Run
from benchmark.load.device_times import device_times
from benchmark.load.point import Workload as Voices
from benchmark.load.provenance import config_of, facts
from benchmark.load.server import ServerProcess
from benchmark.load.user import User
from sglang_live.client.session_options import SessionOptions
from sglang_live.clock import MonotonicClock
from sglang_live.simulation.load.rows import TurnRow
from sglang_live.simulation.load.stats import TTFP_SLO_MS

NONE, FLEX, ORDINARY, ALONE = "heard alone", "flex", "ordinary", "best-effort alone"
BLOCKS = (NONE, FLEX, NONE, ORDINARY)
# After a block its requests end, and what waited behind them.
_PAUSE_S = 2.0
_FIRST_TOKEN_ID = 300
_MOST_TURNS = 200
_MODEL = "demo-random"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """most_tokens: of a best-effort prompt; longer ones are shortened to the demo's context."""

    users: int = 4
    rounds: int = 4
    block_s: float = 10.0
    in_flight: int = 24
    most_tokens: int = 1024
    policies: str = "all"
    device_model: str = ""
    server_args: str = ""
    seed: int = 1
    json: str = ""


@dataclass(slots=True)
class Block:
    """began_s, ended_s: time of the load. Tokens are of requests' outputs, as they come."""

    kind: str
    began_s: float
    ended_s: float = 0.0
    n_tokens: int = 0
    n_done: int = 0
    n_failed: int = 0


@dataclass(slots=True)
class Supply:
    """Keeps a number of written requests in flight during a block."""

    url: str
    options: Options
    http: aiohttp.ClientSession
    work: Any
    rng: np.random.Generator
    blocks: list[Block] = field(default_factory=list)

    async def block(self, kind: str, began_s: float) -> Block:
        block = Block(kind, began_s)
        self.blocks.append(block)
        n = 0 if kind == NONE else self.options.in_flight
        tasks = [asyncio.create_task(self._keep_busy(block)) for _ in range(n)]
        clock_s = time.monotonic()
        await asyncio.sleep(self.options.block_s)
        block.ended_s = began_s + time.monotonic() - clock_s
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(_PAUSE_S)
        return block

    async def _keep_busy(self, block: Block) -> None:
        while True:
            work = next(self.work)
            n_in = min(work.prompt_tokens, self.options.most_tokens)
            body = {
                "input_ids": self.rng.integers(_FIRST_TOKEN_ID, 1500, n_in).tolist(),
                "sampling_params": {"max_new_tokens": work.output_tokens, "ignore_eos": True},
                "stream": True,
            }
            if block.kind != ORDINARY:
                body["priority"] = -1
            await self._send(block, body)

    async def _send(self, block: Block, body: dict[str, Any]) -> None:
        n_seen = 0
        async with self.http.post(f"{self.url}/generate", json=body) as response:
            if response.status != 200:
                block.n_failed += 1
                await asyncio.sleep(0.5)
                return
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                n_out = json.loads(line[6:])["meta_info"]["completion_tokens"]
                if not n_seen:
                    block.n_tokens += len(body["input_ids"])
                block.n_tokens += n_out - n_seen
                n_seen = n_out
        block.n_done += 1


async def measure(server: ServerProcess, options: Options) -> tuple[list[Block], list[TurnRow]]:
    # More turns than there will be: the users are stopped.
    config = LoadConfig(sessions=(options.users,), turns=_MOST_TURNS, seed=options.seed)
    session = SessionOptions(url=server.url, model=_MODEL, turn_timeout_s=60.0)
    voices, clock = Voices.load(config), MonotonicClock()
    run = Run(0, options.users, "all")
    plans = voices.plans(config, run)
    began_s = clock.now_s()
    users = [User(plan, {**voices.speech, **voices.sounds}, session, clock) for plan in plans]
    workload = Workload.load("held_out", "voice")
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        url = f"http://127.0.0.1:{server.port}"
        rng = np.random.default_rng(options.seed)
        supply = Supply(url, options, http, workload.supply(options.seed), rng)
        await supply.block(ALONE, 0.0)
        tasks = [asyncio.create_task(user.run()) for user in users]
        await asyncio.sleep(options.block_s)
        for _ in range(options.rounds):
            for kind in BLOCKS:
                block = await supply.block(kind, clock.now_s() - began_s)
                print(f"{kind}: {block.n_tokens} tokens", flush=True)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(_PAUSE_S)
        await supply.block(ALONE, clock.now_s() - began_s)
    return supply.blocks, [row for user in users for row in user.rows]


def summary(blocks: list[Block], rows: list[TurnRow]) -> list[dict[str, Any]]:
    return [
        _of(kind, [b for b in blocks if b.kind == kind], rows)
        for kind in (NONE, FLEX, ORDINARY, ALONE)
    ]


def _of(kind: str, blocks: list[Block], rows: list[TurnRow]) -> dict[str, Any]:
    spans = [(block.began_s, block.ended_s) for block in blocks]

    def within(row: TurnRow) -> bool:
        said_s = row.start_s + row.record.user_audio_s
        return any(began_s <= said_s < ended_s for began_s, ended_s in spans)

    turns = [row.record for row in rows if within(row)]
    first_ms = [r.ttfp_ms - (r.end_of_turn_ms or 0.0) for r in turns if r.ttfp_ms is not None]
    in_time = [
        r.ok and r.ttfp_ms is not None and r.ttfp_ms - (r.end_of_turn_ms or 0.0) <= TTFP_SLO_MS
        for r in turns
    ]
    heard_s = sum(r.heard_s for r in turns)
    seconds = sum(ended_s - began_s for began_s, ended_s in spans)
    return {
        "arm": kind,
        "n": len(turns),
        "seconds": round(seconds, 1),
        "first_audio_p50_ms": _quantile(first_ms, 0.5),
        "first_audio_p90_ms": _quantile(first_ms, 0.9),
        "attained": round(float(np.mean(in_time)), 4) if turns else None,
        "gaps_per_minute": round(60 * sum(r.gaps_over_100ms for r in turns) / heard_s, 3)
        if heard_s
        else None,
        "continuous": round(float(np.mean([not r.gaps_over_100ms for r in turns])), 4)
        if turns
        else None,
        "be_tokens_per_s": round(sum(block.n_tokens for block in blocks) / seconds, 1)
        if seconds
        else None,
        "n_failed": sum(block.n_failed for block in blocks),
    }


def _quantile(values: list[float], q: float) -> float | None:
    return round(float(np.quantile(values, q)), 1) if len(values) >= 5 else None


def _options() -> Options:
    parser = argparse.ArgumentParser("python -m benchmark.hybrid.on_engine", description=__doc__)
    default = Options()
    for name in Options.__slots__:
        value = getattr(default, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return Options(**vars(parser.parse_args()))


def main() -> None:
    options = _options()
    device = Path(options.device_model) if options.device_model else None
    flags = ["--max-sessions", str(options.users + 4), *options.server_args.split()]
    if device is not None:
        flags += ["--device-model", str(device)]
    with ServerProcess(_MODEL, options.policies, tuple(flags), 600.0) as server:
        blocks, rows = asyncio.run(measure(server, options))
        policy = device_times(server.metrics().replace('what="policy_', 'what="device_policy_'))
    found = summary(blocks, rows)
    for row in found:
        print(json.dumps(row), flush=True)
    if options.json:
        document = facts(device) | {
            "benchmark": "hybrid",
            "config": config_of(options),
            "blocks": [vars_of(block) for block in blocks],
            "policy": policy,
            "summary": found,
        }
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n")


def vars_of(block: Block) -> dict[str, Any]:
    return {name: getattr(block, name) for name in Block.__slots__}


if __name__ == "__main__":
    main()
