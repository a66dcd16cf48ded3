"""Cost of the policies inside a running engine: a thinker with many responses at once.

    python -m benchmark.policy_engine --streams 16,256 --json out.json

Requests run over SGLang's own API with this project's ids, and their consumers' progress comes over
the control channel every 50 ms, so that streams are paused and resumed. Cost is CPU time of the
scheduler's thread for decisions and for receiving progress; moving requests between batches is part
of the rounds.
"""

import argparse
import asyncio
import json
import random
import time
from pathlib import Path

import httpx

from benchmark.load.provenance import facts
from benchmark.native_client import native_client
from benchmark.thinker import load_of, spent, thinker
from sglang_live.ids import THINK_PREFIX
from sglang_live.messages import HeardOfMany
from sglang_live.stages.engine_link import FeedSocket

POLICIES = ("urgency", "pacing", "truncate")
PROGRESS_EVERY_S = 0.05


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmark.policy_engine", description=__doc__)
    parser.add_argument("--streams", default="16,64,256", help="points (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=150, help="per response (default: %(default)s)"
    )
    parser.add_argument(
        "--device-model", type=Path, metavar="FILE", help="rounds take the time of this device"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


async def listen(feed: FeedSocket, rids: list[str]) -> None:
    """Consumers that play one second per second, each started at another time."""
    began_s = time.monotonic()
    offsets_s = [random.Random(rid).uniform(0.0, 1.0) for rid in rids]
    n = len(rids)
    while True:
        heard_s = time.monotonic() - began_s
        taken = [max(0.0, heard_s - offset_s) for offset_s in offsets_s]
        feed.send(HeardOfMany.of(rids, taken, [True] * n))
        await asyncio.sleep(PROGRESS_EVERY_S)


async def measure(replica, n_streams: int, n_tokens: int) -> dict[str, float]:
    feed = FeedSocket(replica.spec.socket_path("inbox"))
    rids = [f"{THINK_PREFIX}{n_streams:06d}-{i:06d}" for i in range(n_streams)]
    before = await load_of(replica)
    async with native_client(replica.spec, 600, httpx.Limits(max_connections=None)) as client:
        listening = asyncio.create_task(listen(feed, rids))
        try:
            answers = await asyncio.gather(
                *(
                    client.post("/generate", json=_request(rid, n, n_tokens))
                    for n, rid in enumerate(rids)
                )
            )
        finally:
            listening.cancel()
    for answer in answers:
        answer.raise_for_status()
    after = await load_of(replica)
    grown = spent(before, after)
    round_ms = after["policy_round_ms"]
    if n_batches := grown.get("device_batches"):
        # The modelled time of a round that computes, however late its result was noticed.
        round_ms = 1000 * grown["device_modelled_s"] / n_batches
    return {
        "n_streams": n_streams,
        "rounds": grown["rounds"],
        "decide_ms_per_round": 1000 * grown["decide_s"] / grown["rounds"],
        "share_of_rounds": grown["decide_s"] / (grown["rounds"] * round_ms / 1000),
        "round_ms": round_ms,
        "pauses": grown["pauses"],
        "resumes": grown["resumes"],
        **_python(grown),
    }


def _python(grown: dict[str, float]) -> dict[str, float]:
    """Share of a modelled device's time in which its scheduler neither computes nor waits."""
    if not grown.get("device_modelled_s"):
        return {}
    idle_s = grown["device_computed_s"] + grown["device_waited_s"]
    return {
        "python_share_of_rounds": 1 - idle_s / grown["device_modelled_s"],
        "late_share_of_rounds": grown["device_late_s"] / grown["device_modelled_s"],
    }


def _request(rid: str, n: int, n_tokens: int) -> dict:
    return {
        "rid": rid,
        "input_ids": [10 + (n * 7 + i) % 180 for i in range(12)],
        "sampling_params": {"max_new_tokens": n_tokens, "temperature": 0, "ignore_eos": True},
    }


async def run(
    points: list[int], n_tokens: int, device_model: Path | None
) -> list[dict[str, float]]:
    rows = []
    # Without it, SGLang reserves room for thousands of tokens per response.
    estimate = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "64"}
    rows_of_engine = {"max_running_requests": max(points) + 8}
    async with thinker(
        POLICIES, rows_of_engine, estimate, device_model, shallow=device_model is not None
    ) as replica:
        for n_streams in points:
            rows.append(await measure(replica, n_streams, n_tokens))
            print(_line(rows[-1]), flush=True)
    return rows


def _line(row: dict[str, float]) -> str:
    return (
        f"{row['n_streams']:5.0f} streams  {row['rounds']:6.0f} rounds of {row['round_ms']:6.1f} ms"
        f"  policies {row['decide_ms_per_round']:.3f} ms ({row['share_of_rounds']:.2%})"
        f"  {row['pauses']:.0f} pauses"
        + (
            f"  Python {row['python_share_of_rounds']:.1%}, late {row['late_share_of_rounds']:.1%}"
            if "python_share_of_rounds" in row
            else ""
        )
    )


def main() -> None:
    args = parse_args()
    points = [int(n) for n in args.streams.split(",")]
    rows = asyncio.run(run(points, args.tokens, args.device_model))
    if args.json:
        known = facts(args.device_model)
        document = {"benchmark": "policy_engine", **known, "policies": POLICIES, "rows": rows}
        args.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
