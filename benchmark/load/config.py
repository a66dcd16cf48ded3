"""Flags of benchmark.voice_load. Only this file reads argv."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WORKLOADS = Path(__file__).parent.parent / "workloads"


@dataclass(frozen=True, slots=True)
class Run:
    """One server, one load: a cell of the experiment."""

    repeat: int
    sessions: int
    policies: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """The experiment.

    Attributes:
        policies: the arms; `all` and `off` as the server knows them, or names joined by `+`.
        sessions: the points. Closed loop: callers at the same time. Open loop: callers in all.
        open_loop_rps: callers that arrive per second; None: closed loop.
        arrival_shape: of the gamma-distributed times between arrivals; 1 is Poisson, smaller
            is burstier.
    """

    policies: tuple[str, ...] = ("off",)
    sessions: tuple[int, ...] = (1, 2, 4, 8)
    turns: int = 8
    barge_in: float = 0.0
    open_loop_rps: float | None = None
    arrival_shape: float = 1.0
    repeats: int = 3
    seed: int = 1
    model_path: str = "demo"
    server_args: tuple[str, ...] = ()
    clips: Path = WORKLOADS / "clips"
    reply_gaps: Path = WORKLOADS / "ami_fto.json"
    turn_timeout_s: float = 60.0
    start_timeout_s: float = 600.0
    json: Path | None = None

    def __post_init__(self):
        if self.barge_in != 0.0:
            raise ValueError(
                f"--barge-in {self.barge_in:g}: callers cannot interrupt yet, only 0 works"
            )
        if not self.policies or not all(self.policies):
            raise ValueError("--policies needs at least one arm, as in off,all")
        if len(set(self.policies)) != len(self.policies):
            raise ValueError(f"--policies names an arm twice: {','.join(self.policies)}")
        if not self.sessions or min(self.sessions) < 1:
            raise ValueError("--sessions needs whole numbers from 1, as in 1,2,4")
        if min(self.turns, self.repeats) < 1:
            raise ValueError("--turns and --repeats must be at least 1")
        if self.open_loop_rps is not None and self.open_loop_rps <= 0:
            raise ValueError("--open-loop must be positive")
        if self.arrival_shape <= 0:
            raise ValueError("--arrival-shape must be positive")
        if self.json is not None and not self.json.parent.is_dir():
            raise ValueError(f"--json: no such folder: {self.json.parent}")

    def runs(self) -> Iterator[Run]:
        """All runs in order, arms interleaved so that a drift of the machine hits them alike."""
        for repeat in range(self.repeats):
            # The arm that goes first changes from repeat to repeat.
            first = repeat % len(self.policies)
            arms = self.policies[first:] + self.policies[:first]
            for sessions in self.sessions:
                for policies in arms:
                    yield Run(repeat, sessions, policies)


def parse_args(argv: list[str] | None = None) -> LoadConfig:
    parser = _parser()
    args = vars(parser.parse_args(argv))
    args["server_args"] = tuple(args["server_args"])
    try:
        return LoadConfig(**args)
    except ValueError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.voice_load",
        description="Voice sessions against a fresh server per run (workload W2).",
    )
    add = parser.add_argument
    add("--policies", type=_names, default=("off",), metavar="ARM,ARM", help="off,all or a+b")
    add("--sessions", type=_numbers, default=(1, 2, 4, 8), metavar="N,N", help="default: 1,2,4,8")
    add("--turns", type=int, default=8, help="per caller (default: %(default)s)")
    add("--barge-in", type=float, default=0.0, help="share of interrupted replies; only 0 so far")
    add(
        "--open-loop",
        type=float,
        dest="open_loop_rps",
        metavar="RATE_RPS",
        help="callers arrive at this rate, whether or not the server keeps up",
    )
    add("--arrival-shape", type=float, default=1.0, help="gamma shape (default: 1, Poisson)")
    add("--repeats", type=int, default=3, help="runs per arm and point (default: %(default)s)")
    add("--seed", type=int, default=1, help="default: %(default)s")
    add("--model-path", default="demo", help="default: %(default)s")
    add(
        "--server-arg",
        dest="server_args",
        action="append",
        default=[],
        metavar="ARG",
        help="passed on to the server; repeat, as in --server-arg=--talker.max-running-requests=8",
    )
    add("--turn-timeout-s", type=float, default=60.0, metavar="S", help="default: %(default)s")
    add("--start-timeout-s", type=float, default=600.0, metavar="S", help="default: %(default)s")
    add("--json", type=Path, metavar="FILE", help="write every turn and the tables' numbers")
    return parser


def _names(value: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in value.split(","))


def _numbers(value: str) -> tuple[int, ...]:
    return tuple(int(number) for number in value.split(","))
