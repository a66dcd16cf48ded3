"""Flags of benchmark.voice_load. Only this file reads argv."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmark.load.drawn_length_model import has_drawn_lengths
from benchmark.load.server import LAUNCH_SERVER, NO_OVERLAP, STOCK
from sglang_live.capacity.control import CapacityConfig
from sglang_live.errors import BadInputError
from sglang_live.extensions.planner.device_model.model import load_device_model
from sglang_live.extensions.planner.simulation.load.storm import StormSpec
from sglang_live.extensions.planner.simulation.workload import RESPONSE_DURATIONS, RESPONSE_GAPS
from sglang_live.policy.policies import NAMES

WORKLOADS = Path(__file__).parent.parent / "workloads"
FRAME_MS = 20
_SERVER_SESSIONS = CapacityConfig().max_sessions


@dataclass(frozen=True, slots=True)
class Run:
    """One server with one load: a cell of the experiment.

    rate_rps: arrivals per second. None: closed loop.
    """

    repeat: int
    sessions: int
    policies: str
    rate_rps: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """The experiment.

    Attributes:
        policies: the arms; the server's `all` and `off`, names joined by `+`, or `stock`: SGLang
            alone, whose clients send the whole conversation with each turn.
        sessions: the points. Closed loop: users at the same time. Open loop: users in total.
        barge_in: share of turns in which the user interrupts the response.
        false_triggers: share of turns in which the microphone picks up a noise instead.
        truncate: whether clients send conversation.item.truncate for an interrupted response.
        acks: whether clients send playback.ack.
        open_loop_rps: arrivals per second, one point each; empty: closed loop.
        duration_s: open loop only; a point then has rate * duration users.
        arrival_shape: shape of the gamma-distributed times between arrivals; 1 is Poisson,
            smaller is burstier.
        trace_arrivals: arrivals in the bursts of a trace of a real service instead.
        storm: sessions that send long audio beside the users.
        history_words: of a written message with which each session begins, as after a long call.
        frame_ms: microphone audio in one message.
        device_model: file of a device model; None: the machine itself.
        drawn_replies: whether responses have lengths drawn from reply_durations, with a model
            that keeps them (benchmark.load.drawn_length_model.py).
        max_tokens: bound of every response, for models that write long ones. None: no bound.
        server_module: program that serves.
        kv: whether the thinker's KV is measured.
    """

    policies: tuple[str, ...] = ("off",)
    sessions: tuple[int, ...] = (1, 2, 4, 8)
    turns: int = 8
    barge_in: float = 0.0
    false_triggers: float = 0.0
    truncate: bool = True
    acks: bool = False
    open_loop_rps: tuple[float, ...] = ()
    duration_s: float | None = None
    arrival_shape: float = 1.0
    trace_arrivals: bool = False
    storm: StormSpec | None = None
    history_words: int = 0
    frame_ms: int = FRAME_MS
    repeats: int = 3
    seed: int = 1
    model_path: str = "demo-random"
    server_args: tuple[str, ...] = ()
    device_model: Path | None = None
    clips: Path = WORKLOADS / "clips"
    reply_gaps: Path = RESPONSE_GAPS
    reply_durations: Path = RESPONSE_DURATIONS
    turn_timeout_s: float = 60.0
    start_timeout_s: float = 600.0
    drawn_replies: bool = False
    max_tokens: int | None = None
    server_module: str = LAUNCH_SERVER
    kv: bool = False
    json: Path | None = None

    def __post_init__(self):
        self._check_arms()
        self._check_load()
        self._check_interruptions()
        if self.drawn_replies and not has_drawn_lengths(self.model_path):
            raise ValueError("--drawn-replies needs demo-random, or a folder of lab.random_model")
        if self.max_tokens is not None and (self.drawn_replies or self.max_tokens < 1):
            raise ValueError("--max-tokens is at least 1, and not beside --drawn-replies")
        if self.device_model is not None:
            load_device_model(self.device_model)
        if self.json is not None and not self.json.parent.is_dir():
            raise ValueError(f"--json: no such folder: {self.json.parent}")

    @property
    def points(self) -> list[tuple[int, float | None]]:
        """(sessions, arrivals per second)."""
        if self.duration_s is not None:
            return [(max(1, round(r * self.duration_s)), r) for r in self.open_loop_rps]
        return [(n, rate) for rate in self.open_loop_rps or (None,) for n in self.sessions]

    def runs(self) -> Iterator[Run]:
        """All runs in order, arms interleaved so that a drift of the machine affects all."""
        for repeat in range(self.repeats):
            # The arm that goes first changes from repeat to repeat.
            first = repeat % len(self.policies)
            arms = self.policies[first:] + self.policies[:first]
            for sessions, rate_rps in self.points:
                for policies in arms:
                    yield Run(repeat, sessions, policies, rate_rps)

    def server_args_for(self, run: Run) -> tuple[str, ...]:
        """The server's flags, with room for all users unless the flag is given."""
        own = self.server_args
        if self.device_model is not None:
            own = (*own, f"--device-model={self.device_model}")
        # A storm's sessions may still be open when the next storm begins.
        at_once = run.sessions + (2 * self.storm.sessions if self.storm else 0)
        given = any(arg.startswith("--max-sessions") for arg in self.server_args)
        if given or at_once <= _SERVER_SESSIONS:
            return own
        return (*own, f"--max-sessions={at_once}")

    def _check_arms(self) -> None:
        if not self.policies or not all(self.policies):
            raise ValueError("--policies needs at least one arm, as in off,all")
        if len(set(self.policies)) != len(self.policies):
            raise ValueError(f"--policies names an arm twice: {','.join(self.policies)}")
        for arm in self.policies:
            words = arm.removesuffix(f"+{NO_OVERLAP}").split("+")
            unknown = sorted(set(words) - set(NAMES))
            if unknown and words not in ([STOCK], ["off"], ["all"]):
                raise ValueError(
                    f"--policies: no policy is called {', '.join(unknown)}; an arm is {STOCK}, "
                    f"off, all, or names joined by +, and may end with +{NO_OVERLAP}: "
                    f"{', '.join(NAMES)}"
                )

    def _check_load(self) -> None:
        if not self.sessions or min(self.sessions) < 1:
            raise ValueError("--sessions needs whole numbers from 1, as in 1,2,4")
        if min(self.turns, self.repeats) < 1:
            raise ValueError("--turns and --repeats must be at least 1")
        if self.history_words < 0:
            raise ValueError("--history-words must not be negative")
        if any(rate <= 0 for rate in self.open_loop_rps):
            raise ValueError("--open-loop must be positive")
        if self.duration_s is not None and (self.duration_s <= 0 or not self.open_loop_rps):
            raise ValueError("--duration-s must be positive, and needs --open-loop")
        if self.arrival_shape <= 0:
            raise ValueError("--arrival-shape must be positive")
        if self.trace_arrivals and (not self.open_loop_rps or self.arrival_shape != 1.0):
            raise ValueError("--trace-arrivals needs --open-loop, and has its own shape")
        if self.frame_ms not in range(FRAME_MS, 201, FRAME_MS):
            raise ValueError(f"--frame-ms must be a multiple of {FRAME_MS} up to 200")

    def _check_interruptions(self) -> None:
        if not (0 <= self.barge_in <= 1 and 0 <= self.false_triggers <= 1):
            raise ValueError("--barge-in and --false-triggers are shares from 0 to 1")
        if self.barge_in and self.turns < 2:
            raise ValueError("--barge-in needs --turns 2 or more: the next turn interrupts")


def parse_args(argv: list[str] | None = None) -> LoadConfig:
    parser = _parser()
    args = vars(parser.parse_args(argv))
    args["server_args"] = tuple(args["server_args"])
    try:
        return LoadConfig(**args)
    except (ValueError, BadInputError) as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.voice_load",
        description="Voice sessions against a fresh server per run (workloads W1, W2, W4).",
    )
    add = parser.add_argument
    add("--policies", type=_names, default=("off",), metavar="ARM,ARM", help="off,all or a+b")
    add("--sessions", type=_numbers, default=(1, 2, 4, 8), metavar="N,N", help="default: 1,2,4,8")
    add("--turns", type=int, default=8, help="per user (default: %(default)s)")
    _add_interruptions(parser.add_argument_group("interruptions"))
    _add_arrivals(parser.add_argument_group("arrivals and storms"))
    add("--repeats", type=int, default=3, help="runs per arm and point (default: %(default)s)")
    add("--seed", type=int, default=1, help="default: %(default)s")
    add("--model-path", default="demo-random", help="default: %(default)s")
    add(
        "--server-arg",
        dest="server_args",
        action="append",
        default=[],
        metavar="ARG",
        help="passed on to the server; repeat, as in --server-arg=--talker.max-running-requests=8",
    )
    add(
        "--device-model",
        type=Path,
        metavar="FILE",
        help="have the server model a device, as python/sglang_live/extensions/planner/"
        "device_model/h100_qwen3_omni.toml",
    )
    add(
        "--frame-ms",
        type=int,
        default=FRAME_MS,
        metavar="MS",
        help="microphone audio per message (default: %(default)s)",
    )
    add(
        "--drawn-replies",
        action="store_true",
        help="responses of lengths drawn from --reply-durations, so that arms do the same work",
    )
    add("--max-tokens", type=int, metavar="N", help="bound of every response")
    add(
        "--history-words",
        type=int,
        default=0,
        metavar="N",
        help="of a written message with which each session begins, as after a long call; "
        "retention keeps its window of it, without --server-arg=--retention-window=0",
    )
    add("--turn-timeout-s", type=float, default=60.0, metavar="S", help="default: %(default)s")
    add("--start-timeout-s", type=float, default=600.0, metavar="S", help="default: %(default)s")
    add("--json", type=Path, metavar="FILE", help="write every turn and the tables' numbers")
    return parser


def _add_interruptions(group) -> None:
    add = group.add_argument
    add("--barge-in", type=float, default=0.0, metavar="P", help="share of responses interrupted")
    add(
        "--false-triggers",
        type=float,
        default=0.0,
        metavar="P",
        help="share of turns with a noise during the response, as 0.1",
    )
    add(
        "--reply-durations",
        type=Path,
        default=RESPONSE_DURATIONS,
        metavar="FILE",
        help="JSON with durations_s, from which the moment of an interruption is drawn "
        "(default: measured with the demo model)",
    )
    add(
        "--no-truncate",
        dest="truncate",
        action="store_false",
        help="clients do not send conversation.item.truncate for interrupted responses",
    )
    add("--acks", action="store_true", help="clients send playback.ack twice a second")


def _add_arrivals(group) -> None:
    add = group.add_argument
    add(
        "--open-loop",
        type=_rates,
        default=(),
        dest="open_loop_rps",
        metavar="RATE,RATE",
        help="users arrive at this rate per second, whether or not the server keeps up",
    )
    add(
        "--duration-s",
        type=float,
        metavar="S",
        help="of an open loop, instead of --sessions: rate * duration users",
    )
    add("--arrival-shape", type=float, default=1.0, help="gamma shape (default: 1, Poisson)")
    add(
        "--trace-arrivals",
        action="store_true",
        help="arrivals in the bursts of a service's trace (benchmark/workloads/traffic.json)",
    )
    add(
        "--storm",
        type=_storm,
        metavar="N:PERIOD_S:CLIP_S",
        help="every PERIOD_S, N more sessions send CLIP_S seconds of audio at once",
    )


def _names(value: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in value.split(","))


def _numbers(value: str) -> tuple[int, ...]:
    return tuple(int(number) for number in value.split(","))


def _rates(value: str) -> tuple[float, ...]:
    return tuple(float(number) for number in value.split(","))


def _storm(value: str) -> StormSpec:
    try:
        return StormSpec.parse(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"reads N:PERIOD_S:CLIP_S, as in 4:10:30: {error}"
        ) from error
