"""Cost of choosing one KV victim: by the index, and by a scan of all candidates.

    python -m benchmark.eviction --pages 1000,10000,100000,1000000 --json out.json

LiveServe (arXiv 2606.22983), Table 1: 5.31 ms on average by a tail scan, 0.093 ms by an index.

Keys are sessions with a known next use, and leaves of the radix tree without one. Two cases: every
page is a key, which is the worst, and a session is one key. Each pick is of one page. After a pick,
another key is ranked again and the victim is inserted again, so that the number of pages stays
constant; these are the updates. The scan is a loop over the same candidates, like that of SGLang's
radix tree over its leaves, and in another arm one NumPy expression over arrays that are kept up to
date elsewhere.
"""

import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmark.load.options import read_options
from benchmark.load.provenance import config_of, facts
from sglang_live.kv.victim_index import VictimIndex

PAGE_TOKENS = 16
CASES = ("page", "session")  # what is a key
ARMS = ("index pick", "index update", "loop scan", "numpy scan")
WARM_UP_PICKS = 100
MIN_SCANS = 5
STEP_S = 0.001  # step of the candidates' clock per pick: some become overdue during a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One flag per field.

    session_pages: pages of each session.
    unknown: share of the pages that are leaves of their own, without a known next use.
    scanned_keys: candidates that all scans of a case visit together; a scan over many is repeated
        less often, because its times hardly scatter.
    """

    pages: str = "1000,10000,100000,1000000"
    picks: int = 20_000
    scanned_keys: int = 4_000_000
    session_pages: int = 40
    unknown: float = 0.2
    seed: int = 1
    json: str = ""

    def __post_init__(self) -> None:
        if not all(n.isdecimal() and int(n) > 0 for n in self.pages.split(",")):
            raise ValueError(f"pages must be positive numbers with commas, got {self.pages}")
        if min(self.picks, self.scanned_keys, self.session_pages) < 1:
            raise ValueError("picks, scanned_keys and session_pages must be positive")
        if not 0 <= self.unknown <= 1:
            raise ValueError(f"unknown is a share, got {self.unknown}")


@dataclass(frozen=True, slots=True)
class Row:
    """Times of one pick or update. key: one of CASES. what: one of ARMS."""

    key: str
    what: str
    n_pages: int
    n_keys: int
    average_ms: float
    p90_ms: float
    max_ms: float


@dataclass(slots=True)
class Key:
    """A session, or a leaf, which has no next_use_s."""

    n_tokens: int
    last_use_s: float
    next_use_s: float | None

    def remaining_s(self, now_s: float) -> float:
        """The index's measure of the time until the next use."""
        if self.next_use_s is None:
            return now_s - self.last_use_s
        return abs(self.next_use_s - now_s)

    def use(self, now_s: float, draw: random.Random) -> None:
        if self.next_use_s is None:
            self.last_use_s = now_s
        else:
            self.next_use_s = drawn_next_use_s(now_s, draw)

    def put(self, index: VictimIndex, name: int) -> None:
        index.put(
            name,
            n_tokens=self.n_tokens,
            last_use_s=self.last_use_s,
            next_use_s=self.next_use_s,
        )


def drawn_next_use_s(now_s: float, draw: random.Random) -> float:
    """A next use after the rest of a response, a gap and an utterance. Some are overdue."""
    return now_s + draw.uniform(-5.0, 20.0) + draw.expovariate(1 / 4)


def draw_keys(case: str, n_pages: int, draw: random.Random, options: Options) -> list[Key]:
    """Draw keys in random order. The ages of leaves rank them among the sessions."""
    n_leaves = round(options.unknown * n_pages)
    per_key = 1 if case == "page" else options.session_pages
    n_known = -(-(n_pages - n_leaves) // per_key)
    keys = [Key(per_key * PAGE_TOKENS, 0.0, drawn_next_use_s(0.0, draw)) for _ in range(n_known)]
    keys += [Key(PAGE_TOKENS, -draw.uniform(0.0, 25.0), None) for _ in range(n_leaves)]
    draw.shuffle(keys)
    return keys


def time_index(
    keys: list[Key], draw: random.Random, options: Options
) -> tuple[list[float], list[float]]:
    """Time picks and updates, in ms. Changes the keys."""
    index = VictimIndex(PAGE_TOKENS)
    for name, key in enumerate(keys):
        key.put(index, name)
    picks_ms, updates_ms = [], []
    for i in range(WARM_UP_PICKS + options.picks):
        now_s = i * STEP_S
        start_s = time.perf_counter()
        (victim,) = index.victims(PAGE_TOKENS, now_s)
        picks_ms.append((time.perf_counter() - start_s) * 1e3)
        for name in (draw.randrange(len(keys)), victim.key):
            keys[name].use(now_s, draw)
            start_s = time.perf_counter()
            keys[name].put(index, name)
            updates_ms.append((time.perf_counter() - start_s) * 1e3)
    return picks_ms[WARM_UP_PICKS:], updates_ms[2 * WARM_UP_PICKS :]


def time_scan(pick: Callable[[float], int], n_keys: int, options: Options) -> list[float]:
    """Time picks, in ms, each at another time of the candidates' clock."""
    n = min(options.picks, max(MIN_SCANS, options.scanned_keys // n_keys))
    times_ms = []
    for i in range(-1, n):
        start_s = time.perf_counter()
        pick(i * STEP_S)
        if i >= 0:
            times_ms.append((time.perf_counter() - start_s) * 1e3)
    return times_ms


def loop_scan(keys: list[Key]) -> Callable[[float], int]:
    return lambda now_s: max(range(len(keys)), key=lambda i: keys[i].remaining_s(now_s))


def numpy_scan(keys: list[Key]) -> Callable[[float], int]:
    known = np.array([key.next_use_s is not None for key in keys])
    at_s = np.array([key.last_use_s if key.next_use_s is None else key.next_use_s for key in keys])

    def pick(now_s: float) -> int:
        away_s = at_s - now_s
        return int(np.where(known, np.abs(away_s), -away_s).argmax())

    return pick


_FIGURES = (np.mean, lambda ms: np.percentile(ms, 90), np.max)


def measure(case: str, n_pages: int, options: Options) -> list[Row]:
    draw = random.Random(options.seed)
    keys = draw_keys(case, n_pages, draw, options)
    scans = [time_scan(scan(keys), len(keys), options) for scan in (loop_scan, numpy_scan)]
    arms = [*time_index(keys, draw, options), *scans]
    return [
        Row(case, what, n_pages, len(keys), *(round(float(f(ms)), 5) for f in _FIGURES))
        for what, ms in zip(ARMS, arms, strict=True)
    ]


def table(rows: list[Row]) -> str:
    heads = (f"{name:>13s}" for name in ("pages", "average ms", "P90 ms", "max ms"))
    lines = [f"{'key':8s} {'what':13s}" + "".join(heads)]
    for row in rows:
        figures = (row.average_ms, row.p90_ms, row.max_ms)
        cells = "".join(f"{figure:>13.5f}" for figure in figures)
        lines.append(f"{row.key:8s} {row.what:13s}{row.n_pages:>13d}{cells}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    options = read_options(Options(), __doc__, argv)
    sizes = [int(n) for n in options.pages.split(",")]
    rows = [row for case in CASES for n in sizes for row in measure(case, n, options)]
    rows.sort(key=lambda row: (CASES.index(row.key), ARMS.index(row.what), row.n_pages))
    print(table(rows))
    if options.json:
        result = {
            "benchmark": "eviction",
            **facts(),
            "numpy_version": np.__version__,
            "options": config_of(options),
            "rows": [asdict(row) for row in rows],
        }
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
