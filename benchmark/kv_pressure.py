"""Workload W3 on a running engine: more sessions than its KV pool holds, by policy.

    python -m benchmark.kv_pressure --arms recompute,lru,next-use,preload --json out.json

Users speak, wait for the first token, listen, and speak again (benchmark/kv/workload.py), over
SGLang's own API of a thinker whose pool holds a share of the working set. This program takes the
part of talker and client; what is reported to the thinker is decided by the gateway's own code, a
SessionMonitor per session (benchmark/kv/listening.py). Each arm has a fresh engine.

    recompute  no host tier, no hints: evicted KV is computed again
    lru        with the host tier
    next-use   and next-use hints
    preload    and speech starts: KV is loaded before its request

Beside the arms the same schedules are replayed without an engine (benchmark.kv.judge): by the
server's estimate, by the reference that knows as much as a server can, and by Belady's optimum.

Without a device, tiers are one memory and copies cost nothing; --device-model has a link that takes
time.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from prometheus_client import CollectorRegistry

from benchmark.kv.gateway import Distributions, GatewayNextUse, Informed
from benchmark.kv.judges import Belady, Lru, Policy, replay
from benchmark.kv.listening import Listener
from benchmark.kv.workload import (
    Access,
    Chain,
    Schedule,
    Spec,
    gaps_of,
    load_chains,
    load_utterances,
    plan,
)
from benchmark.load.options import check_names, parser_of
from benchmark.load.provenance import ROOT, config_of, facts
from benchmark.native_client import native_client
from benchmark.thinker import load_of, thinker
from sglang_live.clock import MonotonicClock
from sglang_live.interaction.monitor import SessionMonitor
from sglang_live.interaction.timeline import Timeline
from sglang_live.interaction.user_stats import UserPrior
from sglang_live.messages import NextUseHint, UserSpeaking
from sglang_live.stages.engine_link import FeedSocket
from sglang_live.telemetry.metrics import GatewayMetrics

# The engine closes a connection after five idle seconds; the client must close it before.
_CONNECTIONS = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
_BASE = ("urgency", "pacing", "truncate", "retention", "next-use")
ARMS = {"recompute": _BASE, "lru": _BASE, "next-use": _BASE, "preload": (*_BASE, "preload")}
_COUNTERS = (
    "tokens_evicted",
    "sessions_evicted",
    "tokens_lost",
    "tokens_written",
    "tokens_loaded",
    "tokens_preloaded",
    "loads",
    "preloads",
    "evictions_waited",
    "reload_s",
    "preloads_skipped_too_late",
    "preloads_skipped_queue",
    "preloads_skipped_cap",
    "preloads_skipped_memory",
    "preloads_overtaken_queue",
    "preloads_overtaken_cap",
    "preloads_overtaken_memory",
    "preloads_overtaken_link",
    "preloads_in_parts",
    "victims_by_estimate",
    "victims_by_lru",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """One flag per field.

    pool_share: size of the pool, as a share of the most KV that all sessions hold at one time.
    divisor: divisor of all lengths of the trace.
    device_model: file of a device model, whose link has a speed; empty: none.
    """

    arms: str = "recompute,lru,next-use,preload"
    sessions: int = 16
    conversations: int = 1
    max_turns: int = 5
    divisor: float = 24.0
    pool_share: float = 0.5
    page: int = 16
    device_model: str = str(ROOT / "benchmark" / "device_models" / "slow_link.toml")
    seed: int = 1
    repeats: int = 1
    json: str = ""


@dataclass(slots=True)
class SessionTimes:
    """Times and tokens of one session.

    ttft_ms: of turns after the first.
    computed: history tokens of these turns that were computed again.
    held: history tokens of these turns.
    """

    ttft_ms: list[float] = field(default_factory=list)
    first_ttft_ms: list[float] = field(default_factory=list)
    computed: int = 0
    held: int = 0
    errors: list[str] = field(default_factory=list)


def chains_of(options: Options) -> list[Chain]:
    return [chain[: options.max_turns] for chain in load_chains() if len(chain) > 1]


def spec_of(options: Options) -> Spec:
    return Spec(
        sessions=options.sessions,
        seed=options.seed,
        conversations=options.conversations,
        divisor=options.divisor,
    )


def schedule_of(options: Options) -> Schedule:
    return plan(chains_of(options), load_utterances(), gaps_of("voice"), spec_of(options))


def engine_args(arm: str, pool_tokens: int, options: Options) -> dict:
    args = {
        "page_size": options.page,
        "max_total_tokens": pool_tokens,
        "max_running_requests": options.sessions + 8,
    }
    if arm != "recompute":
        args |= {"enable_hierarchical_cache": True, "hicache_ratio": 4.0}
    return args


class FeedOfSession:
    """A VoiceSession's reports, sent to the thinker as far as the arm has them."""

    def __init__(self, name: str, arm: str, feed: FeedSocket):
        self.session_id, self._feed = name, feed
        self._hints, self._speaks = arm in ("next-use", "preload"), arm == "preload"

    def report_speech(self, speaks: bool = True) -> None:
        if self._speaks:
            self._feed.send(UserSpeaking(self.session_id, speaks))

    def report_next_use(
        self, to_play_s: float, response_gap_s: float | None, observed_gap_s: float | None
    ) -> None:
        if self._hints:
            hint = NextUseHint(self.session_id, to_play_s, response_gap_s, observed_gap_s)
            self._feed.send(hint)

    def report_playback(self, heard_s: float, playing: bool) -> None:
        """SGLang's own API has no requests that policies pace."""

    def report_underrun(self, silent_s: float) -> None:
        """There is no admission control."""

    def watch(self, on_stream_event: Any) -> None:
        """There are no events of requests."""


class Users:
    """All users of a schedule, against one engine."""

    def __init__(self, arm: str, replica, client: httpx.AsyncClient):
        self._arm, self._client = arm, client
        self._feed = FeedSocket(replica.spec.socket_path("inbox"))
        self._prior, self._clock = UserPrior(), MonotonicClock()
        self._metrics = GatewayMetrics(CollectorRegistry())

    async def converse(self, accesses: list[Access], began_s: float) -> SessionTimes:
        """Run one session's turns in order; its schedule counts from began_s."""
        times, name = SessionTimes(), f"session-{accesses[0].session}"
        rng = random.Random(accesses[0].session)
        body = {"capacity_of_str_len": 1 << 40, "session_id": name, "streaming": True}
        (await self._client.post("/open_session", json=body)).raise_for_status()
        timeline = Timeline(name, began_s=began_s, began_unix_s=time.time())
        reports = FeedOfSession(name, self._arm, self._feed)
        monitor = SessionMonitor(reports, self._clock, self._metrics, timeline, self._prior)
        listener = Listener(monitor, self._clock)
        await asyncio.sleep(max(0.0, began_s + accesses[0].speech_s - time.monotonic()))
        for access in accesses:
            monitor.speech_started(self._clock.now_s())
            await self._speak(monitor, access.request_s - access.speech_s)
            monitor.speech_stopped("silence")
            playback = listener.begin(f"{name}-{access.turn}")
            hearing = asyncio.create_task(listener.hear(playback, access.playback_s))
            await self._turn(name, access, times, rng, listener.text)
            listener.text_completed(playback)
            await hearing
            await asyncio.sleep(access.next_gap_s)
        monitor.close()
        await self._client.post("/close_session", json={"session_id": name})
        return times

    async def _speak(self, monitor: SessionMonitor, duration_s: float) -> None:
        end_s = self._clock.now_s() + duration_s
        while (left_s := end_s - self._clock.now_s()) > 0:
            await asyncio.sleep(min(left_s, 1.0))
            monitor.speech_continues()

    async def _turn(
        self,
        name: str,
        access: Access,
        times: SessionTimes,
        rng: random.Random,
        on_text: Callable[[int], None],
    ) -> None:
        """Run one turn. on_text: called with the number of tokens so far."""
        request = {
            "input_ids": [rng.randrange(10, 200) for _ in range(access.input_tokens)],
            "session_params": {"id": name},
            "sampling_params": {
                "max_new_tokens": access.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
            },
            "stream": True,
        }
        asked_s, first_s, meta = time.monotonic(), 0.0, {}
        async with self._client.stream("POST", "/generate", json=request) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                first_s = first_s or time.monotonic()
                event = json.loads(line[6:])
                if "error" in event:
                    times.errors.append(str(event["error"]))
                    break
                meta = event["meta_info"]
                on_text(meta["completion_tokens"])
        first_s = first_s or time.monotonic()
        (times.ttft_ms if access.turn else times.first_ttft_ms).append(1000 * (first_s - asked_s))
        if access.turn and meta:
            times.held += access.history_tokens
            times.computed += max(0, access.history_tokens - meta.get("cached_tokens", 0) - 1)


async def measure(arm: str, options: Options, schedule: Schedule) -> dict:
    pool_tokens = schedule.pool_tokens(options.pool_share, options.page)
    device_model = Path(options.device_model) if options.device_model else None
    async with (
        thinker(
            ARMS[arm], engine_args(arm, pool_tokens, options), device_model=device_model
        ) as replica,
        native_client(replica.spec, 180, _CONNECTIONS) as client,
    ):
        by_session: dict[int, list[Access]] = {}
        for access in schedule.accesses:
            by_session.setdefault(access.session, []).append(access)
        users, began_s = Users(arm, replica, client), time.monotonic()
        sessions = await asyncio.gather(
            *(users.converse(accesses, began_s) for accesses in by_session.values())
        )
        wall_s = time.monotonic() - began_s
        load = await load_of(replica)
    ttft_ms = np.array([ms for times in sessions for ms in times.ttft_ms])
    return {
        "arm": arm,
        "turns": len(ttft_ms),
        "errors": [error for times in sessions for error in times.errors],
        "pool_tokens": pool_tokens,
        "wall_s": wall_s,
        # P99 of fewer than a hundred turns would be their maximum.
        "ttft_ms": {
            f"p{p}": float(np.percentile(ttft_ms, p)) if p < 99 or len(ttft_ms) >= 100 else None
            for p in (50, 90, 99)
        },
        "held_tokens": sum(times.held for times in sessions),
        "recomputed_tokens": sum(times.computed for times in sessions),
        **{name: load.get(f"policy_{name}", 0.0) for name in _COUNTERS},
        "ttft_all_ms": ttft_ms.tolist(),
    }


def references(options: Options, schedule: Schedule, chains: list[Chain]) -> list[dict]:
    """The schedule replayed without an engine, on demand and with preload at speech starts."""
    spec, utterances_s, gaps = spec_of(options), load_utterances(), gaps_of("voice")
    world = Distributions.of(chains, utterances_s, gaps, spec)
    policies: dict[str, Callable[[], Policy]] = {
        "lru": Lru,
        "next-use": GatewayNextUse,
        "informed": lambda: Informed(world),
        "belady": lambda: Belady(schedule),
    }
    pool_tokens = schedule.pool_tokens(options.pool_share, options.page)
    rows = []
    for name, policy in policies.items():
        demand, early = (
            replay(schedule, pool_tokens, policy(), page_tokens=options.page, preload=preload)
            for preload in (False, True)
        )
        rows.append({"policy": name, "demand": asdict(demand), "preload": asdict(early)})
    return rows


def reference_line(row: dict) -> str:
    demand, early = row["demand"], row["preload"]
    return (
        f"{row['policy']:10s} {demand['reuses']:5d} replayed: {demand['misses']} misses, "
        f"{demand['reloaded_tokens']} tokens; with preload {early['hidden_tokens']} hidden of "
        f"{early['reloaded_tokens']}"
    )


def line(row: dict) -> str:
    ttft = row["ttft_ms"]
    moved = row["tokens_loaded"] + row["tokens_preloaded"]
    hidden = f"{row['tokens_preloaded'] / moved:6.1%}" if moved else "   n/a"
    slowest = "n/a" if ttft["p99"] is None else f"{ttft['p99']:.0f}"
    return (
        f"{row['arm']:10s} {row['turns']:5d} {ttft['p50']:8.0f} {ttft['p90']:8.0f} "
        f"{slowest:>8s} {row['recomputed_tokens']:10.0f} {row['loads']:6.0f} "
        f"{1000 * row['reload_s']:10.0f} {hidden} {row['tokens_lost']:7.0f}"
    )


HEAD = (
    f"{'arm':10s} {'turns':>5s} {'TTFT 50':>8s} {'90':>8s} {'99 ms':>8s} {'recomputed':>10s} "
    f"{'loads':>6s} {'on path ms':>10s} hidden {'lost':>7s}"
)


def parse_args() -> Options:
    parser = parser_of(Options(), __doc__)
    options = Options(**vars(parser.parse_args()))
    check_names(parser, "--arms", options.arms, ARMS)
    return options


def main() -> None:
    options = parse_args()
    rows, replayed = [], []
    print(HEAD, flush=True)
    for repeat in range(options.repeats):
        drawn = replace(options, seed=options.seed + repeat)
        schedule = schedule_of(drawn)
        for row in references(drawn, schedule, chains_of(drawn)):
            replayed.append({"repeat": repeat, **row})
            print(reference_line(row), flush=True)
        for arm in options.arms.split(","):
            row = asyncio.run(measure(arm, options, schedule))
            rows.append({"repeat": repeat, **row})
            print(line(row), flush=True)
    if options.json:
        document = {
            "benchmark": "kv_pressure",
            **facts(Path(options.device_model) if options.device_model else None),
            "config": config_of(options),
            "rows": rows,
            "replayed": replayed,
        }
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
