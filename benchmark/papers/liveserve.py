"""LiveServe's figures (arXiv 2606.22983) on the simulated server.

    python -m benchmark.papers.liveserve --json out.json --picture out.svg

Those of one device by users and interruptions are what benchmark.simulate prints. Here are the
policies one by one, KV that does not fit, a device for each stage, open loops, and continuity over
time. Loads are a closed loop of users where none is named; the device is the modelled H100.
"""

from typing import Any

from benchmark.papers.command import Paper
from benchmark.papers.experiments import Experiment, Row
from benchmark.papers.picture import Panel
from sglang_live.simulation.run import ADMITTED

ALONE = ("urgency", "deadline", "pacing", "truncate", "startup-delay")
TOGETHER = ("urgency+pacing", "urgency+pacing+truncate", "urgency+pacing+truncate+startup-delay")
BY_URGENCY = TOGETHER[-1]
# The sessions hold 31,000 tokens at most; responses of 14 s, of English text.
HALF = {"turns": 10, "reply_scale": 2.0, "frames_per_token": 3.7, "thinker_tokens": 15_500}
# Sessions of three turns arrive for two minutes, 1 to 2 a second, and leave.
OPEN: dict[str, Any] = {"turns": 3, "arrive_s": 120.0}
ARRIVALS: dict[str, dict[str, Any]] = {
    "Poisson": {},
    "bursts": {"arrival_shape": 0.25},
    "Azure trace": {"trace_arrivals": True},
}

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
        arms=(f"{BY_URGENCY}+next-use",),
        users=(32,),
        settings=HALF,
    ),
    Experiment(
        name="half of the KV fits, evicted KV is on the host",
        figure="Fig. 14, 16 right",
        arms=(f"{BY_URGENCY}+next-use", f"{BY_URGENCY}+next-use+preload"),
        users=(32,),
        settings={**HALF, "host_tokens": 400_000},
    ),
    Experiment(
        name="a device for each stage",
        figure="Fig. 10, 11",
        arms=("off", "all"),
        users=(64, 96, 128, 160),
        settings={"turns": 4, "devices": 3},
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
        users=(240,),
        barge_in=(0.0, 0.5),
        settings={**OPEN, **ARRIVALS["Azure trace"]},
        span_s=10.0,
    ),
)


def panels(found: dict[str, list[Row]]) -> list[Panel]:
    ablation, apart = found["ablation"], found["a device for each stage"]
    first_audio = "first audio after the end of the turn, P90, ms"
    return [
        Panel(
            "40 users, one device", "policies", first_audio, ablation, "arm", "first_audio_p90_ms"
        ),
        Panel("", "policies", "continuous responses, %", ablation, "arm", "continuity", 100),
        Panel(
            "a device for each stage", "users", first_audio, apart, "users", "first_audio_p90_ms"
        ),
        Panel("", "users", "continuous responses, %", apart, "users", "continuity", 100),
    ]


PAPER = Paper(
    "papers_liveserve", "LiveServe's figures, simulated on the modelled H100", EXPERIMENTS, panels
)

if __name__ == "__main__":
    PAPER.main(__doc__)
