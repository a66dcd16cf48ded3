"""VoxServe's figures on the simulated server, in shape.

    python -m benchmark.papers.voxserve --json out.json --picture out.svg

The paper's loads are open, of requests to speak a text; these are a closed loop of users who speak
to an Omni model. `one at a time` is a server without batches: each stage serves one request.
"""

from benchmark.papers.command import Paper
from benchmark.papers.experiments import APART, Experiment, Row
from benchmark.papers.picture import Panel

ONE_AT_A_TIME = {"max_running_requests": 1, "vocoder_batch": 1, "overlap": False}
USERS = (8, 16, 24, 32, 40, 48)

EXPERIMENTS = (
    Experiment(
        name="one at a time",
        figure="Fig. 6",
        arms=("off",),
        users=(1, 2, 4, 6, 8),
        settings={"turns": 6, **ONE_AT_A_TIME},
    ),
    Experiment(
        name="batches, without overlap",
        figure="Fig. 6, 7",
        arms=("off", "deadline"),
        users=USERS,
        settings={"turns": 6, "overlap": False},
    ),
    Experiment(
        name="batches, with overlap",
        figure="Fig. 6, 7",
        arms=("off", "deadline"),
        users=USERS,
        settings={"turns": 6},
    ),
    Experiment(
        name="2 servers",
        figure="Fig. 8 top",
        arms=("deadline",),
        users=(48, 64, 72, 80),
        settings={"turns": 6},
        n_servers=2,
    ),
    Experiment(
        name="4 servers",
        figure="Fig. 8 top",
        arms=("deadline",),
        users=(96, 128, 144, 160),
        settings={"turns": 6},
        n_servers=4,
    ),
    Experiment(
        name="a device for each stage",
        figure="Fig. 8 bottom",
        arms=("off", "deadline"),
        users=(48, 96, 128, 160),
        settings=APART,
    ),
)


def panels(found: dict[str, list[Row]]) -> list[Panel]:
    named = {
        "one at a time": found["one at a time"],
        "without overlap": found["batches, without overlap"],
        "with overlap": found["batches, with overlap"],
        "a device for each stage": found["a device for each stage"],
    }
    first_audio = "first audio after the end of the turn, P90, ms"
    return [
        Panel(title, "users", first_audio, rows, "users", "first_audio_p90_ms", log=True)
        for title, rows in named.items()
    ]


PAPER = Paper(
    "papers_voxserve", "VoxServe's figures, simulated on the modelled H100", EXPERIMENTS, panels
)

if __name__ == "__main__":
    PAPER.main(__doc__)
