"""Workload W3 with a thinker that borrows KV memory from an idle or busy talker.

    python -m benchmark.lending --arms none,host,peer,peer+preload,elastic --json out.json

Users speak or type, wait for the first token, listen, and go on (benchmark/kv/workload.py), over
SGLang's own API of a thinker whose pool holds a quarter of the working set. Some turns are typed:
nothing announces their request. A talker speaks meanwhile; in every arm its pool is the same, and
its codes are compared with those of a response alone. Each arm has fresh engines; arms take turns.

    none          no tier: evicted KV is computed again
    host          host memory of little more than a pool, with preload
    peer          and pages that the talker lends; no preload
    peer+preload  the same with preload
    elastic       no tier; the talker's pool gives memory to the thinker's, and takes it back

Both links are modelled (--device-model): a transfer takes the link's time, on a CPU whose tiers are
one memory. Every figure of time is such a model's.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmark.kv.workload import (
    Access,
    Schedule,
    Spec,
    gaps_of,
    load_chains,
    load_utterances,
    plan,
)
from benchmark.lending.speakers import Speakers
from benchmark.lending.stages import running_pair
from benchmark.lending.users import Users
from benchmark.load.options import check_names, parser_of
from benchmark.load.provenance import ROOT, config_of, facts
from benchmark.native_client import native_client
from benchmark.thinker import load_of

_CONNECTIONS = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
_BASE = ("urgency", "pacing", "truncate", "retention", "next-use")
_PRELOAD = (*_BASE, "preload")
ARMS = {
    "none": _BASE,
    "host": _PRELOAD,
    "peer": _BASE,
    "peer+preload": _PRELOAD,
    "elastic": _BASE,
}
_OF_THINKER = (
    "tokens_evicted",
    "tokens_lost",
    "dropped_tokens_lost",
    "tokens_written",
    "tokens_loaded",
    "tokens_preloaded",
    "reload_s",
    "prefills_awaited_kv",
    "prefills_awaited_kv_s",
    "peer_tokens_written",
    "peer_tokens_loaded",
    "peer_tokens_preloaded",
    "peer_tokens_moved",
    "peer_tokens_lost",
    "peer_reload_s",
    "peer_slots",
    "elastic_received",
    "elastic_released",
    "elastic_refused_in_use",
    "elastic_evicted_tokens",
    "elastic_resize_s",
    "elastic_longest_resize_s",
    "elastic_tokens",
)
_OF_TALKER = (
    "tokens_lent",
    "leases_offered",
    "leases_recalled",
    "leases_returned",
    "recall_ms_p50",
    "recall_ms_p99",
    "recall_ms_max",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """One flag per field.

    pool_share: size of the thinker's pool, as a share of the most KV of all sessions at one time.
    host_ratio: size of the host's pool, in pools.
    lender_tokens: size of the talker's pool.
    typed_share: share of turns whose request nothing announces.
    speakers: responses of the talker at the same time; its reserve is for one.
    divisor: divisor of all lengths of the trace.
    """

    arms: str = "none,host,peer,peer+preload,elastic"
    sessions: int = 16
    conversations: int = 1
    max_turns: int = 5
    divisor: float = 24.0
    pool_share: float = 0.25
    host_ratio: float = 1.1
    lender_tokens: int = 32_768
    typed_share: float = 0.5
    speakers: int = 4
    page: int = 16
    device_model: str = str(ROOT / "benchmark" / "device_models" / "slow_link.toml")
    seed: int = 1
    repeats: int = 1
    json: str = ""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where both engines compute.

    Attributes:
        device_model: file, or "" for the machine itself.
        devices: of thinker and talker.
        engine_args: further arguments of both.
    """

    device_model: str
    devices: tuple[str, str] = ("cuda:0", "cuda:1")
    engine_args: Mapping[str, Any] = field(default_factory=dict)


def schedule_of(options: Options) -> Schedule:
    chains = [chain[: options.max_turns] for chain in load_chains() if len(chain) > 1]
    spec = Spec(
        sessions=options.sessions,
        seed=options.seed,
        conversations=options.conversations,
        divisor=options.divisor,
    )
    return plan(chains, load_utterances(), gaps_of("voice"), spec)


def thinker_args(arm: str, pool_tokens: int, options: Options) -> dict:
    args = {
        "page_size": options.page,
        "max_total_tokens": pool_tokens,
        "max_running_requests": options.sessions + 8,
    }
    if arm not in ("none", "elastic"):
        args |= {"enable_hierarchical_cache": True, "hicache_ratio": options.host_ratio}
    return args


async def measure(arm: str, options: Options, schedule: Schedule, place: Place) -> dict:
    pool_tokens = schedule.pool_tokens(options.pool_share, options.page)
    by_session: dict[int, list[Access]] = {}
    for access in schedule.accesses:
        by_session.setdefault(access.session, []).append(access)
    async with running_pair(
        ARMS[arm],
        thinker_args(arm, pool_tokens, options) | dict(place.engine_args),
        {"page_size": options.page, "max_total_tokens": options.lender_tokens, **place.engine_args},
        place.device_model,
        devices=place.devices,
        lends=arm.startswith("peer"),
        elastic=arm == "elastic",
    ) as pair:
        speakers = Speakers(pair)
        await speakers.learn()
        await pair.settle(lends=arm.startswith("peer"))
        async with native_client(pair.thinker.spec, 180, _CONNECTIONS) as client:
            users, began_s = Users(pair.thinker, client, "preload" in ARMS[arm]), time.monotonic()
            async with speakers.speaking(options.speakers):
                sessions = await asyncio.gather(
                    *(
                        users.converse(accesses, began_s, options.typed_share)
                        for accesses in by_session.values()
                    )
                )
            wall_s = time.monotonic() - began_s
        thinker, talker = await load_of(pair.thinker), await load_of(pair.talker)
    turns = [turn for turns in sessions for turn in turns if turn.number]
    return {
        "arm": arm,
        "pool_tokens": pool_tokens,
        "wall_s": wall_s,
        "errors": [turn.error for turns in sessions for turn in turns if turn.error],
        "ttft_ms": {
            kind: percentiles([t.ttft_ms for t in turns if t.typed == typed])
            for kind, typed in (("typed", True), ("spoken", False))
        }
        | {"all": percentiles([t.ttft_ms for t in turns])},
        "thinker_gap_ms": percentiles([turn.gap_ms for turn in turns]),
        "turns": len(turns),
        "warm_turns": sum(turn.computed == 0 for turn in turns),
        "held_tokens": sum(turn.held for turn in turns),
        "recomputed_tokens": sum(turn.computed for turn in turns),
        **{name: thinker.get(f"policy_{name}", 0.0) for name in _OF_THINKER},
        **{name: talker.get(f"policy_{name}", 0.0) for name in _OF_TALKER},
        "lender": speakers.result(),
        "turns_all": [asdict(turn) for turn in turns],
    }


def percentiles(values: list[float]) -> dict[str, float | None]:
    # P99 of fewer than a hundred turns would be their maximum.
    known = np.array(values) if values else np.array([np.nan])
    return {
        "n": len(values),
        **{f"p{p}": float(np.percentile(known, p)) for p in (50, 90)},
        "p99": float(np.percentile(known, 99)) if len(values) >= 100 else None,
        "max": float(known.max()),
    }


HEAD = (
    f"{'arm':13s} {'turns':>5s} {'warm':>6s} {'recomp.':>8s} {'all 50':>7s} {'99/max':>7s} "
    f"{'typed 50':>8s} {'99/max':>7s} {'spoken 50':>9s} {'99/max':>7s} {'gap 90':>7s} {'max':>5s} "
    f"{'recalls':>7s} {'P99 ms':>7s} {'TTFP 50':>8s} "
    f"{'gap 99':>7s} wrong codes   (ms on modelled links)"
)


def line(row: dict) -> str:
    def ends(kind: str) -> str:
        ttft = row["ttft_ms"][kind]
        last = ttft["max"] if ttft["p99"] is None else ttft["p99"]
        width = {"all": 7, "typed": 8, "spoken": 9}[kind]
        return f"{ttft['p50']:{width}.0f} {last:7.0f}"

    lender = row["lender"]
    return (
        f"{row['arm']:13s} {row['turns']:5d} {row['warm_turns'] / row['turns']:6.1%} "
        f"{row['recomputed_tokens']:8.0f} {ends('all')} {ends('typed')} {ends('spoken')} "
        f"{row['thinker_gap_ms']['p90']:7.0f} {row['thinker_gap_ms']['max']:5.0f} "
        f"{row['leases_returned']:7.0f} {row['recall_ms_p99']:7.1f} {lender['ttfp_ms_p50']:8.0f} "
        f"{lender['gap_ms_p99']:7.0f} {lender['wrong']:d} of {lender['n']:d}"
    )


def main() -> None:
    parser, rows = parser_of(Options(), __doc__), []
    options = Options(**vars(parser.parse_args()))
    check_names(parser, "--arms", options.arms, ARMS)
    place = Place(device_model=options.device_model)
    print(HEAD, flush=True)
    for repeat in range(options.repeats):
        schedule = schedule_of(replace(options, seed=options.seed + repeat))
        for arm in options.arms.split(","):
            row = asyncio.run(measure(arm, options, schedule, place))
            rows.append({"repeat": repeat, **row})
            print(line(row), flush=True)
    if options.json:
        document = {
            "benchmark": "lending",
            **facts(Path(options.device_model)),
            "config": config_of(options),
            "rows": rows,
        }
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
