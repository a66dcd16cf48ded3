"""What decoding requests and a returning session notice of a load over the link to host memory.

    python -m benchmark.scaled_clock 2 slow_load --json out.json

A thinker on a modelled device, whose pool holds half of the idle sessions; the KV of the others is
on the host. Sessions return in turn, so that each of their requests waits for a load. Meanwhile
other requests decode without end. An arm is a way to load:

    layers   SGLang's: layer by layer within the prefill
    put-off  the server's: where that would delay decodes by more than a round, most of it before
             the prefill

Its figures are the time to the first token of the sessions, and the time between two tokens of
those that decode, by the speed of the link. Arms alternate, each with a fresh engine.
"""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import numpy as np

from benchmark.load.link_speed import with_link
from benchmark.load.options import check_names, parser_of
from benchmark.load.provenance import config_of, facts
from benchmark.native_client import native_client
from benchmark.thinker import load_of, spent, thinker
from sglang_live.extensions.planner.device_model.model import H100

_KV = ("truncate", "retention", "next-use")
# Without listeners `pacing` pauses no request: it decides where a load begins, and nothing else.
ARMS = {"layers": _KV, "put-off": (*_KV, "pacing")}
_INPUT_TOKENS, _OUTPUT_TOKENS = 32, 2
_DECODED_TOKENS = 400
_CONNECTIONS = httpx.Limits(max_connections=None, keepalive_expiry=2.0)


@dataclass(frozen=True, kw_only=True)
class Options:
    """One flag per field.

    link_gb_per_s: speeds of the link, one load each.
    sessions, history_tokens: idle sessions, and the tokens that each begins with.
    decoders: requests that decode meanwhile.
    returns: requests of sessions in each run.
    pause_s: mean pause between two of them.
    """

    arms: str = "layers,put-off"
    link_gb_per_s: str = "55,12,4"
    sessions: int = 8
    history_tokens: int = 4000
    decoders: int = 8
    returns: int = 40
    pause_s: float = 0.3
    device_model: str = str(H100)
    repeats: int = 3
    seed: int = 1
    json: str = ""


def engine_args(options: Options) -> dict:
    held = options.sessions // 2 * options.history_tokens
    return {
        "page_size": 16,
        "max_total_tokens": held + options.decoders * 2 * _DECODED_TOKENS,
        "max_running_requests": options.decoders + options.sessions,
        # A chunk's result would be noticed after the small model has computed the next one.
        "chunked_prefill_size": 2 * options.history_tokens,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 4.0,
    }


async def tokens_of(
    client: httpx.AsyncClient, ids: list[int], n: int, session: str = ""
) -> tuple[list[float], dict]:
    """Times at which the tokens of a response come, and the last one's facts."""
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": n, "temperature": 0, "ignore_eos": True},
        "stream": True,
    }
    if session:
        body["session_params"] = {"id": session}
    came_s: list[float] = []
    meta: dict = {}
    async with client.stream("POST", "/generate", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                came_s.append(time.monotonic())
                meta = event["meta_info"]
    return came_s, meta


async def decode(client: httpx.AsyncClient, rng: random.Random, gaps_s: list[float]) -> None:
    while True:
        ids = [rng.randrange(10, 200) for _ in range(_INPUT_TOKENS)]
        came_s, _ = await tokens_of(client, ids, _DECODED_TOKENS)
        gaps_s += [b - a for a, b in pairwise(came_s)]


@contextlib.asynccontextmanager
async def decoding(
    client: httpx.AsyncClient, options: Options, gaps_s: list[float]
) -> AsyncIterator[None]:
    """A context in which requests decode."""
    rngs = [random.Random(f"decoder-{n}") for n in range(options.decoders)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(decode(client, rng, gaps_s)) for rng in rngs]
        await asyncio.sleep(1.0)
        gaps_s.clear()  # those of prefills at the begin
        yield
        for task in tasks:
            task.cancel()


async def measure(arm: str, device_model: Path, options: Options, seed: int) -> dict:
    rng = random.Random(seed)
    names = [f"session-{n}" for n in range(options.sessions)]
    args = engine_args(options)
    async with (
        thinker(ARMS[arm], args, device_model=device_model) as replica,
        native_client(replica.spec, 180, _CONNECTIONS) as client,
    ):
        for name in names:
            body = {"capacity_of_str_len": 1 << 40, "session_id": name, "streaming": True}
            (await client.post("/open_session", json=body)).raise_for_status()
            ids = [rng.randrange(10, 200) for _ in range(options.history_tokens)]
            await tokens_of(client, ids, _OUTPUT_TOKENS, name)
        gaps_s: list[float] = []
        before, first_s, computed = await load_of(replica), [], 0
        async with decoding(client, options, gaps_s):
            for n in range(options.returns):
                await asyncio.sleep(rng.expovariate(1 / options.pause_s))
                ids = [rng.randrange(10, 200) for _ in range(_INPUT_TOKENS)]
                asked_s = time.monotonic()
                came_s, meta = await tokens_of(client, ids, _OUTPUT_TOKENS, names[n % len(names)])
                first_s.append(came_s[0] - asked_s)
                held = options.history_tokens - meta["cached_tokens"]
                computed += max(0, held)
        used = spent(before, await load_of(replica))
    gaps_ms = 1000 * np.array(gaps_s)
    worst_ms = np.sort(gaps_ms)[-options.returns :]
    return {
        "arm": arm,
        "ttft_ms": percentiles(1000 * np.array(first_s)),
        "gap_ms": percentiles(gaps_ms),
        # As many gaps as sessions return, of each request that decodes.
        "gap_ms_beside_loads": float(
            np.sort(gaps_ms)[-options.returns * options.decoders :].mean()
        ),
        "worst_gaps_ms": [round(float(gap), 1) for gap in worst_ms],
        "computed_again": computed,
        **{
            name: used.get(name, 0.0)
            for name in ("loads", "reload_s", "prefills_awaited_kv", "prefills_awaited_kv_s")
        },
    }


def percentiles(values: np.ndarray) -> dict[str, float]:
    points = {f"p{p}": float(np.percentile(values, p)) for p in (50, 90, 99)}
    return {"n": len(values), **points, "max": float(values.max())}


HEAD = (
    f"{'link GB/s':>9s} {'arm':8s} {'first 50':>8s} {'90':>6s} {'gap 50':>7s} {'99':>6s} "
    f"{'max':>6s} {'beside':>7s} {'loads':>5s} {'put off':>7s}   (ms on a modelled device)"
)


def line(row: dict) -> str:
    ttft, gap = row["ttft_ms"], row["gap_ms"]
    return (
        f"{row['link_gb_per_s']:9g} {row['arm']:8s} {ttft['p50']:8.0f} {ttft['p90']:6.0f} "
        f"{gap['p50']:7.1f} {gap['p99']:6.1f} {gap['max']:6.0f} {row['gap_ms_beside_loads']:7.1f} "
        f"{row['loads']:5.0f} {row['prefills_awaited_kv']:7.0f}"
    )


def main() -> None:
    parser, rows = parser_of(Options(), __doc__), []
    options = Options(**vars(parser.parse_args()))
    check_names(parser, "--arms", options.arms, ARMS)
    print(HEAD, flush=True)
    with TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            for speed in map(float, options.link_gb_per_s.split(",")):
                model = with_link(Path(options.device_model), speed, Path(folder))
                for arm in options.arms.split(","):
                    row = asyncio.run(measure(arm, model, options, options.seed + repeat))
                    rows.append({"repeat": repeat, "link_gb_per_s": speed, **row})
                    print(line(rows[-1]), flush=True)
    if options.json:
        document = {
            "benchmark": "slow_load",
            **facts(Path(options.device_model)),
            "config": config_of(options),
            "rows": rows,
        }
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
