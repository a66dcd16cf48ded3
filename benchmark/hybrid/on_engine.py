"""Speech and best-effort work in one running thinker: stock SGLang, the paper, and the policies.

    python -m benchmark.hybrid.on_engine --json out.json

The comparison of benchmark.hybrid, with SGLang's own scheduler in real time: on a modelled device
with a small model beneath it, or with `--device-model ''` on this machine. The users' speech counts
as the tokens that it makes; it is not encoded. Arms that differ by flags have an engine each; all
get the same turns and work. The capacity is the most turns per second of which the policies,
without best-effort work, serve 99 % within the objectives. It is searched on `tune`, and the arms
run on `held_out`.
"""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.hybrid.clients import Clients, SinceBegin, http_of
from benchmark.hybrid.coarse_device import coarse_device
from benchmark.hybrid.conversations import Conversations
from benchmark.hybrid.idle_share import needed_share
from benchmark.hybrid.listeners import LEAD_S, TPOT_S, TTFT_S, Record
from benchmark.hybrid.report import ALONE, LIVE_ALONE, line, summary
from benchmark.hybrid.workload import KINDS, PARTS, Part, Workload
from benchmark.load.options import check_names, parser_of
from benchmark.load.provenance import config_of, facts
from benchmark.native_client import native_client
from benchmark.thinker import load_of, spent, thinker
from sglang_live.extensions.planner.device_model.model import H100, load_device_model
from sglang_live.policy.policies import POLICIES
from sglang_live.stages.engine_link import FeedSocket
from sglang_live.stages.supervisor import Replica

# Before it the engine fills; the latest turns have not been served at the end.
WARM_S, TAIL_S = 8.0, 4.0
_ATTAINED = 0.99
_SEARCH_STEPS = 5
_SETTLE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArm:
    """Flags of an engine."""

    policies: tuple[str, ...] = ()
    args: dict[str, Any] = field(default_factory=dict)


ENGINES = {
    "fcfs": EngineArm(),
    "priority": EngineArm(
        args={"enable_priority_scheduling": True, "retraction_policy": "priority"}
    ),
    "bros": EngineArm(policies=("fcfs", "bros")),
    "hybrid": EngineArm(policies=POLICIES),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One flag per field.

    device_model: file of a device model; empty: this machine.
    divisor: of the lengths of prompts, and of the pool and the chunk.
    capacity: turns per second; 0: it is searched, up to most_per_s.
    rows: requests with KV at a time.
    """

    device_model: str = str(H100)
    divisor: int = 4
    capacity: float = 0.0
    most_per_s: float = 16.0
    loads: str = "0.5,0.8,1.0"
    seconds: float = 40.0
    in_flight: int = 128
    pool_tokens: int = 400_000
    chunk_tokens: int = 8192
    rows: int = 512
    kind: str = "voice"
    best_effort: str = "code"
    engines: str = ",".join(ENGINES)
    seed: int = 1
    json: str = ""


class RunningThinker:
    """One engine, for several runs one after the other."""

    def __init__(self, replica: Replica, options: Options, *, hears: bool):
        self._replica, self._options = replica, options
        self._feed = FeedSocket(replica.spec.socket_path("inbox")) if hears else None

    async def run(self, part: Part, per_s: float, n_best_effort: int) -> dict[str, Any]:
        """A row of results."""
        options = self._options
        workload = Workload.load(part, options.kind, options.best_effort)
        turns = workload.turns(per_s, options.seconds, options.seed)
        rng = np.random.default_rng([options.seed, 3])
        async with http_of(self._replica.spec) as http:
            conversations = Conversations(http, options.divisor, rng)
            if options.kind == "voice":
                await conversations.open(turns)
            before = await load_of(self._replica)
            record = Record(SinceBegin(), WARM_S)
            clients = Clients(http, self._feed, record, conversations, options.divisor, rng)
            supply = workload.supply(options.seed)
            await clients.run(turns, supply, n_best_effort, options.seconds)
            after = await load_of(self._replica)
            grown = spent(before, after)
            await conversations.close()
        await self._settle()
        outcome = record.outcome(options.seconds, TAIL_S, grown.get("device_modelled_s", 0.0))
        row = {"per_s": round(per_s, 3), "seed": options.seed} | outcome.to_json()
        if "policy_round_error_p90" in after:
            row["round_error"] = after["policy_round_error_p90"]
        return row | _engine_of(grown)

    async def _settle(self) -> None:
        """Wait until nothing of the latest run is left, and forget its KV."""
        async with native_client(self._replica.spec, 60) as client, asyncio.timeout(_SETTLE_S):
            await client.post("/abort_request", json={"rid": "", "abort_all": True})
            while (await client.post("/flush_cache")).status_code != 200:
                await asyncio.sleep(0.5)


def _engine_of(grown: dict[str, float]) -> dict[str, float]:
    """What the engine says of a run: cost of the policies, moves of best effort, late results."""
    found: dict[str, float] = {}
    if grown.get("rounds"):
        found["policy_ms"] = round(1000 * grown["decide_s"] / grown["rounds"], 4)
    for name in ("be_requeued", "be_retracted", "be_retracted_tokens", "be_pauses"):
        if name in grown:
            found[name.removeprefix("be_")] = grown[name]
    if grown.get("device_modelled_s"):
        found["late"] = round(grown["device_late_s"] / grown["device_modelled_s"], 4)
    return found


@asynccontextmanager
async def engine_of(name: str, options: Options) -> AsyncIterator[RunningThinker]:
    arm, divisor = ENGINES[name], options.divisor
    args = {
        "max_running_requests": options.rows,
        "max_total_tokens": options.pool_tokens // divisor,
        "chunked_prefill_size": options.chunk_tokens // divisor,
        "incremental_streaming_output": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        device = None
        if options.device_model:
            device = coarse_device(Path(options.device_model), divisor, Path(folder))
        running = thinker(
            arm.policies, args | arm.args, device_model=device, shallow=device is not None
        )
        async with running as replica:
            yield RunningThinker(replica, options, hears=bool(arm.policies))


async def capacity_per_s(engine: RunningThinker, options: Options) -> float:
    """By bisection."""
    low, high = 0.0, options.most_per_s
    for _ in range(_SEARCH_STEPS):
        middle = (low + high) / 2
        row = await engine.run(PARTS[0], middle, 0)
        print(f"{middle:.2f} turns per second: {row['attained']:.4f} {row}", flush=True)
        low, high = (middle, high) if row["attained"] >= _ATTAINED else (low, middle)
    return low


async def measure(options: Options) -> tuple[float, list[dict[str, Any]]]:
    """The capacity, and all rows: of an engine one after the other."""
    capacity, rows = options.capacity, []
    if not capacity:
        async with engine_of("hybrid", options) as engine:
            capacity = await capacity_per_s(engine, options)
    print(f"capacity: {capacity:.2f} turns per second", flush=True)
    loads = [float(text) for text in options.loads.split(",")]
    for name in options.engines.split(","):
        async with engine_of(name, options) as engine:
            if name == "fcfs":
                rows.append(
                    {"arm": ALONE, "load": 0.0} | await engine.run(PARTS[1], 0.0, options.in_flight)
                )
                print(line(rows[-1]), flush=True)
            for load in loads:
                for arm, n in _arms_of(name, options.in_flight):
                    row = await engine.run(PARTS[1], load * capacity, n)
                    rows.append({"arm": arm, "load": load} | row)
                    print(line(rows[-1]), flush=True)
    return capacity, rows


def _arms_of(engine: str, in_flight: int) -> list[tuple[str, int]]:
    """Arms of an engine, and their best-effort requests in flight."""
    return [*([(LIVE_ALONE, 0)] if engine == "hybrid" else []), (engine, in_flight)]


def bound(rows: list[dict[str, Any]], options: Options) -> None:
    """Add to each row the best effort that the time would allow which listeners do not need."""
    alone = next((row["be_tokens_per_s"] for row in rows if row["arm"] == ALONE), 0.0)
    workload = Workload.load(PARTS[1], options.kind, options.best_effort)
    costs = load_device_model(Path(options.device_model)).thinker if options.device_model else None
    for row in rows:
        needed = row["load"]
        if costs is not None:
            turns = workload.turns(row["per_s"], options.seconds, options.seed)
            turns = [replace(turn, audio_s=0.0) for turn in turns]
            needed = needed_share(turns, costs, options.seconds)
        row["bound_tokens_per_s"] = round(max(0.0, 1 - needed) * alone, 1)


def main() -> None:
    parser = parser_of(Options(), __doc__)
    options = Options(**vars(parser.parse_args()))
    check_names(parser, "--engines", options.engines, ENGINES)
    check_names(parser, "--kind", options.kind, KINDS)
    known = facts(Path(options.device_model) if options.device_model else None)
    capacity, rows = asyncio.run(measure(options))
    bound(rows, options)
    if options.json:
        document = known | {
            "benchmark": "hybrid",
            "config": config_of(options) | {"seeds": [options.seed]},
            "objectives": {"ttft_s": TTFT_S, "tpot_s": TPOT_S, "lead_s": LEAD_S},
            "capacity_per_s": capacity,
            "rows": rows,
            "summary": summary(rows),
        }
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
