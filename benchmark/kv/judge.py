"""Eviction policies against the offline optimum, which has the schedule of all users.

    python -m benchmark.kv.judge --sessions 32 --regime voice --pool-share 0.25,0.5 --seeds 1,2,3

Workload W3 without an engine. Misses are accesses, of all after a session's first, whose KV is
not all there; reloaded counts tokens, wait is per access. Loads happen on demand. The last two
columns are from a second replay with preload at the start of speech, whose early loads take room
too. "next-use" is the server's estimate, "informed" the reference that knows as much as a server
can (benchmark/kv/gateway.py). "end of playback known" is next-use with the true end of playback.
"Belady, no end" has the times at which users speak again, but not the ends of sessions.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmark.kv.gateway import Distributions, GatewayNextUse, Informed
from benchmark.kv.judges import Belady, Link, Lru, NextUseHint, Outcome, Policy, replay
from benchmark.kv.workload import (
    FRAMES_PER_TOKEN,
    Chain,
    Gaps,
    Schedule,
    Spec,
    gaps_of,
    load_chains,
    load_utterances,
    plan,
)
from benchmark.load.provenance import config_of, facts

LRU, NEXT_USE, INFORMED = "LRU", "next-use", "informed"
END_KNOWN, OPEN_END, BELADY = "end of playback known", "Belady, no end", "Belady"
POLICIES = (LRU, NEXT_USE, INFORMED, END_KNOWN, OPEN_END, BELADY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One flag per field.

    Attributes:
        chat_scale: factor on the chat regime's gaps; 1 is the trace's.
        link_tokens_per_s: bandwidth of the link; the default is 10 GB/s at 96 KiB per token.
    """

    sessions: tuple[int, ...] = (32,)
    regime: str = "voice"
    pool_share: tuple[float, ...] = (0.25, 0.5)
    seeds: tuple[int, ...] = (1, 2, 3)
    conversations: int = 3
    divisor: float = 8.0
    frames_per_token: float = FRAMES_PER_TOKEN
    chat_scale: float = 1.0
    page_tokens: int = 16
    link_tokens_per_s: float = 100_000.0
    link_latency_s: float = 0.001
    json: str = ""

    def __post_init__(self):
        if not all(0 < share <= 1 for share in self.pool_share):
            raise ValueError("--pool-share is a share of the working set, from 0 to 1")
        if min(self.page_tokens, self.link_tokens_per_s, self.chat_scale) <= 0:
            raise ValueError("pages, link and gaps must be larger than nothing")
        if self.link_latency_s < 0:
            raise ValueError("--link-latency-s must not be negative")

    def spec(self, sessions: int, seed: int) -> Spec:
        return Spec(
            sessions=sessions,
            seed=seed,
            conversations=self.conversations,
            divisor=self.divisor,
            frames_per_token=self.frames_per_token,
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One policy at one point and seed.

    early: outcome of the replay with preload.
    """

    sessions: int
    pool_share: float
    seed: int
    pool_tokens: int
    policy: str
    demand: Outcome
    early: Outcome


def parse_options(argv: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(prog="python -m benchmark.kv.judge", description=__doc__)
    for option in fields(Options):
        flag = "--" + option.name.replace("_", "-")
        if isinstance(option.default, tuple):
            kind = type(option.default[0])
            parser.add_argument(flag, type=_many(kind), default=option.default, metavar="N,N")
        else:
            parser.add_argument(flag, type=option.type, default=option.default)
    try:
        options = Options(**vars(parser.parse_args(argv)))
        gaps_of(options.regime)
        for sessions in options.sessions:
            options.spec(sessions, options.seeds[0])
    except ValueError as error:
        parser.error(str(error))
    return options


def _many(kind: type):
    def read(value: str) -> tuple:
        return tuple(kind(part) for part in value.split(","))

    return read


@dataclass(frozen=True, slots=True)
class Inputs:
    """Data that schedules are drawn from."""

    chains: list[Chain]
    utterances_s: np.ndarray
    gaps: Gaps

    def schedule(self, spec: Spec) -> Schedule:
        return plan(self.chains, self.utterances_s, self.gaps, spec)

    def policy(self, name: str, schedule: Schedule, spec: Spec, *, preload: bool) -> Policy:
        if name == LRU:
            return Lru(speech_is_use=preload)
        if name == NEXT_USE:
            return GatewayNextUse()
        if name == INFORMED:
            return Informed(Distributions.of(self.chains, self.utterances_s, self.gaps, spec))
        if name == END_KNOWN:
            return NextUseHint(self.gaps.median_s + float(np.median(self.utterances_s)))
        return Belady(schedule, knows_end=name == BELADY)


def run(options: Options) -> Iterator[Row]:
    inputs = Inputs(load_chains(), load_utterances(), gaps_of(options.regime, options.chat_scale))
    link = Link(options.link_tokens_per_s, options.link_latency_s)
    for sessions in options.sessions:
        for seed in options.seeds:
            spec = options.spec(sessions, seed)
            schedule = inputs.schedule(spec)
            for share in options.pool_share:
                pool_tokens = schedule.pool_tokens(share, options.page_tokens)
                for name in POLICIES:
                    demand, early = (
                        replay(
                            schedule,
                            pool_tokens,
                            inputs.policy(name, schedule, spec, preload=preload),
                            page_tokens=options.page_tokens,
                            link=link,
                            preload=preload,
                        )
                        for preload in (False, True)
                    )
                    yield Row(sessions, share, seed, pool_tokens, name, demand, early)


def print_table(rows: list[Row], options: Options) -> None:
    print(f"{options.regime}, mean of {len(options.seeds)} seeds")
    print(
        f"{'sessions':>8s} {'pool':>6s} {'policy':22s}{'misses':>8s}{'of':>6s}"
        f"{'/inf.':>7s}{'/Belady':>9s}"
        f"{'reloaded':>10s}{'vs LRU':>8s}{'cycles':>8s}{'wait ms':>9s}{'hidden':>9s}{'wait ms':>9s}"
    )
    for sessions, share in sorted({(row.sessions, row.pool_share) for row in rows}):
        point = [row for row in rows if (row.sessions, row.pool_share) == (sessions, share)]
        of = {name: [row for row in point if row.policy == name] for name in POLICIES}
        for own in of.values():
            print(f"{sessions:8d} {share:6.0%} " + line(own, of))


def line(own: list[Row], of: dict[str, list[Row]]) -> str:
    """of: rows of the same point, by policy."""
    misses, reloaded = _mean(own, "misses"), _mean(own, "reloaded_tokens")
    reuses = _mean(own, "reuses")
    beyond, more = (_ratio(misses, _mean(of[name], "misses")) for name in (INFORMED, BELADY))
    lru_tokens = _mean(of[LRU], "reloaded_tokens")
    saved = _ratio(reloaded - lru_tokens, lru_tokens)
    early_tokens = sum(row.early.reloaded_tokens for row in own)
    hidden = _ratio(sum(row.early.hidden_tokens for row in own), early_tokens)
    # Reload time that users wait for, per access after a session's first.
    late_ms = [
        _text(_ratio(1e3 * fmean(outcome.path_s for outcome in outcomes), reuses), ".2f")
        for outcomes in ([row.demand for row in own], [row.early for row in own])
    ]
    return (
        f"{own[0].policy:22s}{misses:8.1f}{reuses:6.0f}{_text(beyond, '.2f'):>7s}"
        f"{_text(more, '.2f'):>9s}{reloaded:10.0f}"
        f"{_text(saved, '+.0%'):>8s}{_mean(own, 'cycles'):8.1f}"
        f"{late_ms[0]:>9s}{_text(hidden, '.1%'):>9s}{late_ms[1]:>9s}"
    )


def _mean(rows: list[Row], name: str) -> float:
    return fmean(getattr(row.demand, name) for row in rows)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _text(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def main() -> None:
    options = parse_options()
    rows = list(run(options))
    print_table(rows, options)
    if overdrawn := sum(row.demand.overdrawn + row.early.overdrawn for row in rows):
        print(f"\n{overdrawn} accesses found the pool smaller than the running sessions alone")
    if options.json:
        result = {
            "benchmark": "kv_judge",
            **facts(),
            "numpy_version": np.__version__,
            "options": config_of(options),
            "rows": [asdict(row) for row in rows],
        }
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
