"""LiveServe's figures (arXiv 2606.22983) on the simulated server.

    python -m benchmark.papers.liveserve --json out.json --picture out.svg

Loads are a closed loop of users, as in the paper; the device is the modelled H100, which the three
stages share, or one for each stage.
"""

from benchmark.papers.command import Paper
from benchmark.papers.experiments import Experiment, Row
from benchmark.papers.picture import Panel

SERVED = ("off", "deadline", "all")
ALONE = ("urgency", "pacing", "truncate", "startup-delay")
TOGETHER = ("urgency+pacing", "urgency+pacing+truncate", "urgency+pacing+truncate+startup-delay")
BY_URGENCY = "urgency+pacing+truncate+startup-delay"
# The sessions hold 31,000 tokens at most; responses of 14 s, of English text.
HALF = {"turns": 10, "reply_scale": 2.0, "frames_per_token": 3.7, "thinker_tokens": 15_500}

EXPERIMENTS = (
    Experiment(
        name="load",
        figure="Fig. 10, 11",
        arms=SERVED,
        users=(8, 16, 24, 32, 40, 48, 64),
        settings={"turns": 6},
    ),
    Experiment(
        name="load, a device for each stage",
        figure="Fig. 10, 11",
        arms=("off", "all"),
        users=(64, 96, 128, 160),
        settings={"turns": 4, "devices": 3},
    ),
    Experiment(
        name="interruptions",
        figure="Fig. 13, 16 left",
        arms=("off", "deadline", "all"),
        users=(32,),
        barge_in=(0.0, 0.3, 0.5, 0.7, 1.0),
        settings={"turns": 6},
    ),
    Experiment(
        name="ablation",
        figure="Fig. 14",
        arms=("off", *ALONE, *TOGETHER, "all"),
        users=(40,),
        barge_in=(0.0, 0.5),
        settings={"turns": 6},
    ),
    Experiment(
        name="long responses",
        figure="Fig. 15, 16 left",
        arms=("off", "all"),
        users=(8, 16, 32),
        barge_in=(0.5,),
        settings={"turns": 3, "reply_scale": 4.0},
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
)


def panels(found: dict[str, list[Row]]) -> list[Panel]:
    load = found["load"]
    apart = found["load, a device for each stage"]
    share = found["interruptions"]
    first_audio = "first audio after the end of the turn, P90, ms"
    return [
        Panel("one device", "users", first_audio, load, "users", "first_audio_p90_ms", log=True),
        Panel("one device", "users", "continuous responses, %", load, "users", "continuity", 100),
        Panel(
            "a device for each stage",
            "users",
            first_audio,
            apart,
            "users",
            "first_audio_p90_ms",
            log=True,
        ),
        Panel(
            "a device for each stage",
            "users",
            "continuous responses, %",
            apart,
            "users",
            "continuity",
            100,
        ),
        Panel(
            "32 users",
            "share of interrupted responses",
            "talker's frames not heard, %",
            share,
            "barge_in",
            "waste",
            100,
        ),
        Panel(
            "32 users",
            "share of interrupted responses",
            first_audio,
            share,
            "barge_in",
            "first_audio_p90_ms",
        ),
    ]


PAPER = Paper(
    "papers_liveserve", "LiveServe's figures, simulated on the modelled H100", EXPERIMENTS, panels
)

if __name__ == "__main__":
    PAPER.main(__doc__)
