"""Cost of the policies of one scheduling round, by number of streams.

    python -m benchmark.policy_cost --json out.json

Also the cost of receiving progress of all streams at once, which is the maximum in one round: the
stage sends the newest progress of every stream in one message.

Streams are random: most play and have some audio buffered, some are paused, a few wait or have just
begun. With `hybrid` there are as many best-effort streams beside them: half of them decode, the
others wait or are paused. Policy sets alternate round by round, so that a disturbance of the
machine affects all.
"""

import json
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmark.load.options import read_options
from benchmark.load.provenance import facts
from sglang_live.bridge.stream_table import StreamTable
from sglang_live.engine_channel.inbox import Inbox
from sglang_live.messages import HeardOfMany
from sglang_live.policy.decide import RoundPolicy
from sglang_live.policy.policies import Policies
from sglang_live.policy.round_cost import RoundCost
from sglang_live.policy.view import FRAME_S, BestEffort, StageRates, StageView
from sglang_live.stages.engine_link import FeedSocket

N_STREAMS = (16, 64, 256, 1024, 4096)
POLICIES = (
    ("fcfs",),
    ("fcfs", "pacing"),
    ("urgency",),
    ("urgency", "pacing"),
    ("urgency", "pacing", "hybrid"),
    ("deadline",),
    ("deadline", "pacing"),
)
COST = RoundCost(
    decode=(0.008, 2e-5, 1e-8),
    prefill=(0.01, 2e-5, 1e-9, 1e-9, 0.005, 0.0),
    decode_error=0.1,
    prefill_error=0.1,
)
VIEWS = 64  # several, so that no branch is always predicted
WARM_UP_ROUNDS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One flag per field; shares are of all streams."""

    rounds: int = 1000
    waiting: float = 0.04
    starting: float = 0.04
    paused: float = 0.4
    unmanaged: float = 0.02
    unknown: float = 0.01
    seed: int = 1
    json: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Times of one decide()."""

    policies: str
    n_streams: int
    p50_ms: float
    p99_ms: float


def random_view(n: int, rng: np.random.Generator, options: Options) -> StageView:
    shares = np.cumsum([options.waiting, options.starting, options.paused])
    state = np.searchsorted(shares, rng.random(n))  # waiting, starting, paused, playing
    waiting = state == 0
    buffered_s = rng.uniform(0.3, 2.0, n)
    buffered_s[state == 1] = rng.uniform(0.0, 0.3, np.count_nonzero(state == 1))
    buffered_s[waiting] = 0.0
    buffered_s[(rng.random(n) < options.unknown) & (state == 3)] = np.nan
    tokens = rng.integers(50, 1500, n)
    prefill_tokens = np.where(waiting, tokens, 0)
    return StageView(
        now_s=1000.0,
        occupancy=0.7,
        # Half of the views have room for all waiting streams.
        free_tokens=int(prefill_tokens.sum() * rng.choice([0.6, 1.5])),
        prefill_running=False,
        rates=StageRates(round_s=0.015),
        waiting=waiting,
        paused=state == 2,
        since_s=1000.0 - rng.exponential(0.5, n),
        arrived_s=1000.0 - rng.exponential(5.0, n),
        buffered_s=buffered_s,
        started=state >= 2,
        kv_tokens=np.where(waiting, 0, tokens),
        prefill_tokens=prefill_tokens,
        managed=(rng.random(n) >= options.unmanaged) | (state == 2),
    )


def with_best_effort(view: StageView, rng: np.random.Generator) -> StageView:
    """The same streams, and as many of best effort."""
    n = len(view)
    state = rng.integers(0, 4, n)  # decoding, decoding, waiting, paused
    waiting, tokens = state == 2, rng.integers(200, 4000, n)
    own = {
        "waiting": waiting,
        "paused": state == 3,
        "since_s": 1000.0 - rng.exponential(1.0, n),
        "arrived_s": 1000.0 - rng.exponential(20.0, n),
        "buffered_s": np.full(n, np.inf),
        "started": np.ones(n, bool),
        "kv_tokens": np.where(waiting, 0, tokens),
        "prefill_tokens": np.where(waiting, tokens, 0),
        "managed": np.zeros(n, bool),
    }
    both = {name: np.concatenate((getattr(view, name), values)) for name, values in own.items()}
    best_effort = BestEffort(
        which=np.arange(2 * n) >= n,
        half=np.zeros(2 * n, bool),
        deadline_s=np.full(2 * n, np.inf),
        group=np.arange(2 * n),
        free_tokens=view.free_tokens,
        cost=COST,
    )
    return replace(view, **both, best_effort=best_effort)


def measure(n: int, rng: np.random.Generator, options: Options) -> list[Row]:
    sets = [RoundPolicy.of(Policies.parse(names)) for names in POLICIES]
    times_ms = np.zeros((len(sets), options.rounds))
    alone = [random_view(n, rng, options) for _ in range(VIEWS)]
    beside = [with_best_effort(view, rng) for view in alone]
    views_of = [beside if "hybrid" in names else alone for names in POLICIES]
    for i in range(-WARM_UP_ROUNDS, options.rounds):
        for policies, views, own_ms in zip(sets, views_of, times_ms, strict=True):
            view = views[i % VIEWS]
            start_s = time.perf_counter()
            policies.decide(view)
            took_s = time.perf_counter() - start_s
            if i >= 0:
                own_ms[i] = took_s * 1e3
    return [
        Row("+".join(names), n, *(round(float(p), 4) for p in np.percentile(own_ms, (50, 99))))
        for names, own_ms in zip(POLICIES, times_ms, strict=True)
    ]


def measure_channel(n: int, options: Options) -> Row:
    """Drain one message with the progress of n streams, and enter it into the stream table."""
    rids = [f"speak-{i:032x}" for i in range(n)]
    table = StreamTable(FRAME_S)
    for rid in rids:
        table.wait(rid, now_s=0.0, managed=True, prompt_tokens=100, prefill_tokens=100)
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/inbox"
        inbox, feed = Inbox(address), FeedSocket(address)
        times_ms = []
        for i in range(-WARM_UP_ROUNDS, options.rounds):
            feed.send(HeardOfMany.of(rids, [0.01 * i] * n, [True] * n))
            while not inbox.socket.poll(1):
                pass
            start_s = time.perf_counter()
            for news in inbox.drain():
                table.progress(news, float(i))
            if i >= 0:
                times_ms.append((time.perf_counter() - start_s) * 1e3)
        inbox.socket.close()
    p50, p99 = np.percentile(times_ms, (50, 99))
    return Row("control channel", n, round(float(p50), 4), round(float(p99), 4))


def print_table(rows: list[Row]) -> None:
    print(f"{'policies':22s}" + "".join(f"{n:>18d}" for n in N_STREAMS))
    print(f"{'P50 / P99 ms':22s}")
    for name in dict.fromkeys(row.policies for row in rows):
        own = [row for row in rows if row.policies == name]
        cells = "".join(f"{row.p50_ms:>10.3f} /{row.p99_ms:6.3f}" for row in own)
        print(f"{name:22s}{cells}")


def main() -> None:
    options = read_options(Options(), __doc__)
    rng = np.random.default_rng(options.seed)
    rows = [row for n in N_STREAMS for row in measure(n, rng, options)]
    rows += [measure_channel(n, options) for n in N_STREAMS]
    print_table(rows)
    if options.json:
        result = {
            "benchmark": "policy_cost",
            **facts(),
            "numpy_version": np.__version__,
            "options": {k: v for k, v in asdict(options).items() if k != "json"},
            "rows": [asdict(row) for row in rows],
        }
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
