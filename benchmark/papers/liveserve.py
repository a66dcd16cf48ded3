"""LiveServe's figures (arXiv 2606.22983) on the simulated server.

    python -m benchmark.papers.liveserve --json out.json --picture out.svg

Those of one device by users and interruptions are what benchmark.simulate prints. Here are the
policies one by one, KV that does not fit, a device for each stage, open loops, and continuity over
time. Loads are a closed loop of users where none is named; the device is the modelled H100.
"""

from typing import Any

from benchmark.papers.command import Paper
from benchmark.papers.experiments import APART, Experiment, Row
from benchmark.papers.picture import Panel, Point
from sglang_live.extensions.planner.simulation.run import ADMITTED
from sglang_live.policy.config import THINKER

ALONE = ("urgency", "deadline", "pacing", "truncate", "startup-delay")
TOGETHER = ("urgency+pacing", "urgency+pacing+truncate", "urgency+pacing+truncate+startup-delay")
BY_URGENCY = TOGETHER[-1]
PACED = f"{BY_URGENCY}+next-use"
# The sessions hold 31,000 tokens at most; responses of 14 s, of English text.
HALF = {"turns": 10, "reply_scale": 2.0, "frames_per_token": 3.7, "thinker_tokens": 15_500}
# Sessions of three turns arrive for two minutes, 1 to 2 a second, and leave.
OPEN: dict[str, Any] = {"turns": 3, "arrive_s": 120.0}
ARRIVALS: dict[str, dict[str, Any]] = {
    "Poisson": {},
    "bursts": {"arrival_shape": 0.25},
    "Azure trace": {"trace_arrivals": True},
}
OVER_TIME_USERS = 240

# Sessions of one turn with a conversation of up to 8,000 tokens, and responses of 28 s. Their
# requests hold 124,000 tokens at most where there is room.
LONG: dict[str, Any] = {
    **{"turns": 1, "arrive_s": 60.0, "reply_scale": 4.0, "history_tokens": 8000},
    "reserve_all": True,
}
LONG_NEED_TOKENS = 124_000
POOL_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6)
U2_WITHOUT_KV = "U2 without KV"
U2_WEIGHTS = {"U2 by KV": THINKER.urgency.beta, U2_WITHOUT_KV: 0.0}
U2_SPAN_S = 5.0
# LiveServe tunes beta over alpha for each stage; only their ratio counts.
SWEPT_WEIGHTS = (0.0, 0.00125, 0.0025, 0.005, 0.01, 0.02, 0.08)
SWEPT_SHARES = (0.8, 0.6)

EXPERIMENTS = (
    Experiment(
        name="ablation",
        figure="Fig. 14",
        arms=("off", *ALONE, *TOGETHER, "all"),
        users=(40,),
        barge_in=(0.0, 0.5),
        settings={"turns": 6},
    ),
    Experiment(
        name="half of the KV fits, evicted KV is computed again",
        figure="Fig. 14, 16 right",
        arms=(PACED,),
        users=(32,),
        settings=HALF,
    ),
    Experiment(
        name="half of the KV fits, evicted KV is on the host",
        figure="Fig. 14, 16 right",
        arms=(PACED, f"{PACED}+preload"),
        users=(32,),
        settings={**HALF, "host_tokens": 400_000},
    ),
    Experiment(
        name="a device for each stage",
        figure="Fig. 10, 11",
        arms=("off", "all"),
        users=(64, 96, 128, 160),
        barge_in=(0.0, 0.5),
        settings=APART,
    ),
    *(
        Experiment(
            name=f"open loop, {name}",
            figure="Fig. 12",
            arms=("off", "deadline", "all", ADMITTED),
            users=(120, 150, 180, 210, 240),
            settings={**OPEN, **settings},
        )
        for name, settings in ARRIVALS.items()
    ),
    Experiment(
        name="continuity over time",
        figure="Fig. 18",
        arms=("off", "deadline", "all"),
        users=(OVER_TIME_USERS,),
        barge_in=(0.0, 0.5),
        settings={**OPEN, **ARRIVALS["Azure trace"]},
        span_s=10.0,
    ),
    *(
        Experiment(
            name=f"{name}, {share:.0%} of the KV fits",
            figure="Fig. 17",
            # Without pauses the weight has no effect.
            arms=(PACED,) if name == U2_WITHOUT_KV else ("next-use", PACED),
            users=(60,),
            settings={
                **LONG,
                "thinker_tokens": round(share * LONG_NEED_TOKENS),
                "kv_weight": weight,
            },
            span_s=U2_SPAN_S,
            watch_s=400.0,
        )
        for share in POOL_SHARES
        for name, weight in U2_WEIGHTS.items()
    ),
    *(
        Experiment(
            name=f"swept weight of KV {weight:g}, {share:.0%} of the KV fits",
            figure="equations 1 to 3",
            arms=(PACED,),
            users=(60,),
            settings={
                **LONG,
                "thinker_tokens": round(share * LONG_NEED_TOKENS),
                "kv_weight": weight,
            },
        )
        for share in SWEPT_SHARES
        for weight in SWEPT_WEIGHTS
    ),
    *(
        Experiment(
            name=f"swept weight of KV {weight:g}, all KV fits",
            figure="equations 1 to 3",
            arms=("all",),
            users=(76,),
            barge_in=(0.5,),
            settings={"turns": 6, "kv_weight": weight},
        )
        for weight in (0.0, 0.005, 0.08)
    ),
)


FIRST_AUDIO = "first audio after the end of the turn, P90, ms"
CONTINUOUS = "continuous responses, %"


def panels(found: dict[str, list[Row]]) -> list[Panel]:
    """Of the experiments that the document has."""
    drawn = []
    if ablation := found.get("ablation"):
        drawn += _pair("40 users, one device", "policies", ablation, "arm")
    if apart := found.get("a device for each stage"):
        drawn += _pair("a device for each stage", "users", apart, "users")
    for name in ARRIVALS:
        if rows := found.get(f"open loop, {name}"):
            drawn += _pair(f"open loop, {name}", "sessions per second", rows, "arrivals_per_s")
    if rows := found.get("continuity over time"):
        for barge_in in sorted({row.barge_in for row in rows}):
            title = f"{OVER_TIME_USERS} sessions, Azure trace, interruptions {barge_in:g}"
            points = [
                Point(row.arm, span.begin_s, span.continuity)
                for row in rows
                if row.barge_in == barge_in
                for span in row.over_time
            ]
            drawn.append(Panel(title, "time, s", CONTINUOUS, points, "x", "y", 100))
    return drawn + _memory(found)


def _pair(title: str, label: str, rows: list[Row], x: str) -> list[Panel]:
    return [
        Panel(title, label, FIRST_AUDIO, rows, x, "first_audio_p90_ms"),
        Panel("", label, CONTINUOUS, rows, x, "continuity", 100),
    ]


def _memory(found: dict[str, list[Row]]) -> list[Panel]:
    """First audio and continuity by the pool, and KV over time in the smallest one."""
    rows = [
        (name if row.arm == PACED else row.arm, share, row)
        for share in POOL_SHARES
        for name in U2_WEIGHTS
        for row in found.get(f"{name}, {share:.0%} of the KV fits", [])
    ]
    if not rows:
        return []

    def by_share(y: str) -> list[Point]:
        return [Point(name, 100 * share, getattr(row, y)) for name, share, row in rows]

    held = [
        Point(name, n * U2_SPAN_S, tokens)
        for name, share, row in rows
        if share == min(POOL_SHARES) and row.pool is not None
        for n, tokens in enumerate(row.pool.tokens_over_time)
    ]
    waiting = [
        Point(name, 100 * share, row.pool.waiting_mean) for name, share, row in rows if row.pool
    ]
    pool = "pool, % of the need"
    return [
        Panel("60 sessions", pool, FIRST_AUDIO, by_share("first_audio_p90_ms"), "x", "y"),
        Panel("", pool, CONTINUOUS, by_share("continuity"), "x", "y", 100),
        Panel("", pool, "requests that wait, mean", waiting, "x", "y"),
        Panel(f"{min(POOL_SHARES):.0%} fits", "time, s", "KV of requests, tokens", held, "x", "y"),
    ]


PAPER = Paper(
    "papers_liveserve", "LiveServe's figures, simulated on the modelled H100", EXPERIMENTS, panels
)

if __name__ == "__main__":
    PAPER.main(__doc__)
