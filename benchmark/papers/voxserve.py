"""VoxServe's figures on the simulated server, in shape.

    python -m benchmark.papers.voxserve --json out.json --picture out.svg

The paper's loads are open, of requests to speak a text; these are a closed loop of users who speak
to an Omni model. `one at a time` is a server without batches: each stage serves one request.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.load.provenance import facts
from benchmark.papers.experiments import Experiment, Row, rows_of, show, to_json, write
from benchmark.papers.picture import Panel, draw
from benchmark.simulate.config import SimulateConfig
from sglang_live.simulation.frontier import Capacity, capacity
from sglang_live.simulation.load.stats import PointStats
from sglang_live.simulation.run import Simulated, World, point_of

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
        name="a device for each stage",
        figure="Fig. 8 bottom",
        arms=("off", "deadline"),
        users=(48, 96, 128, 160),
        settings={"turns": 4, "devices": 3},
    ),
)
COPIES = (1, 2, 4)
# The paper's scheduler.
COPIED = "deadline"


class Copies:
    """Servers side by side; each user gets one of them by chance, as the paper's requests do."""

    def __init__(self, n_servers: int, repeats: int, seed: int):
        config = SimulateConfig(turns=4, repeats=repeats, seed=seed)
        self._world = World(config.workload(0.0), config.server, config.users)
        self._n_servers, self._repeats, self._seed = n_servers, repeats, seed

    def point(self, arm: str, n_users: int) -> PointStats:
        runs: list[Simulated] = []
        for repeat in range(self._repeats):
            rng = np.random.default_rng((self._seed, repeat, n_users))
            for server, n in enumerate(np.bincount(rng.integers(0, self._n_servers, n_users))):
                if n:
                    # Users of every server are other ones.
                    runs.append(self._world.simulate(arm, int(n), 100 * repeat + server))
        return point_of(arm, n_users, runs)

    def capacity(self, arm: str) -> Capacity:
        return capacity(self.point, arm)


def copies(repeats: int, seed: int) -> list[dict[str, Any]]:
    found = []
    for n_servers in COPIES:
        one = Copies(n_servers, repeats, seed).capacity(COPIED)
        print(f"{n_servers} devices: {one.users} users; at {one.fails_at}: {one.why}", flush=True)
        found.append({"n_devices": n_servers, "arm": COPIED, **asdict(one)})
    return found


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="seeds (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the document")
    parser.add_argument("--picture", type=Path, help="draw the curves, SVG or PNG")
    options = parser.parse_args()
    config = SimulateConfig(repeats=options.repeats, seed=options.seed)
    known = facts(config.device_model)
    found: dict[str, list[Row]] = {}
    for experiment in EXPERIMENTS:
        found[experiment.name] = rows_of(experiment, options.repeats, options.seed)
        show(experiment, found[experiment.name])
    side_by_side = copies(options.repeats, options.seed)
    if options.json is not None:
        rows = [to_json(one, found[one.name]) for one in EXPERIMENTS]
        rows.append({"name": "copies", "figure": "Fig. 8 top", "rows": side_by_side})
        write("papers_voxserve", known, config, rows, options.json)
    if options.picture is not None:
        draw("VoxServe's figures, simulated on the modelled H100", panels(found), options.picture)


if __name__ == "__main__":
    main()
