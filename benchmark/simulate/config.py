"""Flags of benchmark.simulate. Only this file reads argv."""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from benchmark.load.config import LoadConfig
from benchmark.simulate.traffic import Traffic
from sglang_live.errors import BadInputError
from sglang_live.extensions.planner.device_model.model import H100, load_device_model
from sglang_live.extensions.planner.simulation.load.storm import StormSpec
from sglang_live.extensions.planner.simulation.noise import Noise
from sglang_live.extensions.planner.simulation.placement import APART, SHARED
from sglang_live.extensions.planner.simulation.run import Arm
from sglang_live.extensions.planner.simulation.sharing import SHARINGS, Sharing
from sglang_live.extensions.planner.simulation.spec import ServerSpec
from sglang_live.extensions.planner.simulation.users import UserSettings
from sglang_live.extensions.planner.simulation.workload import RESPONSE_DURATIONS, History, Workload
from sglang_live.policy.config import THINKER
from sglang_live.stages.vocoder.config import VocoderConfig

# The best that clients of SGLang can do: the whole conversation in each request, or a session whose
# response is truncated and whose instructions are computed ahead; and either without overlap, which
# makes the first audio earlier.
BASELINES = (
    *("stock", "stock+no-overlap"),
    *("truncate+preheat", "truncate+preheat+no-overlap"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateConfig:
    """The experiment. Flags of the same name mean the same as in voice_load.

    Attributes:
        barge_in: shares of interrupted responses, one load each.
        devices: 1: all stages share a device; 3: each has its own.
        sharing: how the processes of a shared device have it.
        thinker_tokens, talker_tokens: KV pools.
        host_tokens: of the thinker in host memory; 0: there is no such tier.
        header_tokens: instructions of a session.
        history_tokens: most of a conversation that a user brings: spread evenly from 0, computed
            with the first turn.
        kv_weight: of the thinker's U2 utility, UrgencyConfig.beta.
        reserve_all: whether the thinker leaves the room of whole responses free, and its policies
            know; otherwise as SGLang, whose retraction is not simulated.
        overlap: as without --disable-overlap-schedule.
        max_running_requests: in each engine at once; 0: as many as users.
        vocoder_batch: chunks in a batch of the vocoder, --vocoder.max-batch.
        frames_per_token: codec frames for each token of text; 1 as with --drawn-replies.
        reply_scale: factor of the durations in reply_durations.
        arrive_s: time in which all users arrive, as in an open loop; 0: they begin within a few
            seconds.
        arrival_shape: of the gamma-distributed times between arrivals, as in voice_load.
        trace_arrivals: they arrive in the bursts of a service's trace instead.
        storm: sessions that send long audio beside the users.
        against: document of voice_load on a modelled device to be compared with.
        speculate_ms: silence before a speculative turn, but in baselines; 0: none begins.
        speech_pauses: of users within a second of speech.
        pauses_s: mean time between two pauses of the host; 0: it is quiet.
        frontier: whether the capacity of each arm is searched.
        of_knee: the numbers of users, as shares of what the best baseline serves within the SLO,
            instead of sessions.
        picture: file for the curves.
    """

    policies: tuple[str, ...] = (*BASELINES, "all")
    sessions: tuple[int, ...] = (8, 16, 32, 64)
    turns: int = 8
    barge_in: tuple[float, ...] = (0.0,)
    repeats: int = 3
    seed: int = 1
    device_model: Path = H100
    devices: int = 1
    sharing: Sharing = "queue"
    thinker_tokens: int = 200_000
    talker_tokens: int = 100_000
    host_tokens: int = 0
    header_tokens: int = 200
    history_tokens: int = 0
    kv_weight: float = THINKER.urgency.beta
    reserve_all: bool = False
    overlap: bool = True
    max_running_requests: int = 0
    vocoder_batch: int = VocoderConfig().max_batch
    frames_per_token: float = 1.0
    reply_scale: float = 1.0
    reply_durations: Path = RESPONSE_DURATIONS
    arrive_s: float = 0.0
    arrival_shape: float = 1.0
    trace_arrivals: bool = False
    storm: StormSpec | None = None
    against: Path | None = None
    speculate_ms: int = 0
    speech_pauses: float = 0.0
    pauses_s: float = 0.0
    frontier: bool = False
    of_knee: tuple[float, ...] = ()
    json: Path | None = None
    picture: Path | None = None

    def __post_init__(self) -> None:
        load_device_model(self.device_model)
        if self.devices not in (1, 3):
            raise ValueError("--devices is 1, shared by all stages, or 3")
        if self.devices == 3 and self.sharing != "queue":
            raise ValueError("--sharing: no device is shared with --devices 3")
        if self.history_tokens < 0 or self.kv_weight < 0:
            raise ValueError("--history-tokens and --kv-weight are not negative")
        if self.frames_per_token < 1 or self.reply_scale <= 0:
            raise ValueError("--frames-per-token is at least 1, --reply-scale positive")
        has_shape = self.arrival_shape != 1.0
        if self.pauses_s < 0 or self.speech_pauses < 0:
            raise ValueError("--pauses-s and --speech-pauses are not negative")
        if not 0 <= self.speculate_ms < 500:
            raise ValueError("--speculate-ms is below the silence that ends a turn, 500")
        if self.of_knee and not (self.frontier and min(self.of_knee) > 0 and self.baselines):
            raise ValueError("--of-knee has positive shares, and needs --frontier and a baseline")
        if self.arrive_s < 0 or ((self.trace_arrivals or has_shape) and not self.arrive_s):
            raise ValueError(
                "--arrive-s is not negative; --trace-arrivals and --arrival-shape need it"
            )
        if self.arrival_shape <= 0 or (self.trace_arrivals and has_shape):
            raise ValueError("--arrival-shape is positive, and --trace-arrivals has its own")
        for barge_in in self.barge_in:
            self._check_load(barge_in)
            self.workload(barge_in)

    def _check_load(self, barge_in: float) -> None:
        """As voice_load checks the flags of the same names. Raises ValueError."""
        for arm in self.policies:
            Arm.parse(arm)
        LoadConfig(
            sessions=self.sessions,
            turns=self.turns,
            barge_in=barge_in,
            repeats=self.repeats,
            seed=self.seed,
        )

    @property
    def baselines(self) -> tuple[str, ...]:
        return tuple(arm for arm in self.policies if Arm.parse(arm).is_baseline)

    @property
    def noise(self) -> Noise | None:
        return Noise(self.pauses_s) if self.pauses_s else None

    def workload(self, barge_in: float) -> Workload:
        """Users of this share of interruptions. Raises ValueError."""
        found = Workload.load(
            turns=self.turns, barge_in=barge_in, seed=self.seed, durations=self.reply_durations
        )
        counts = Traffic.load().second_counts if self.trace_arrivals else None
        return replace(
            found,
            arrive_s=self.arrive_s,
            arrival_shape=self.arrival_shape,
            second_counts=counts,
            pauses_per_s=self.speech_pauses,
        )

    @property
    def server(self) -> ServerSpec:
        return ServerSpec(
            model=load_device_model(self.device_model),
            placement=SHARED if self.devices == 1 else APART,
            sharing=self.sharing,
            thinker_tokens=self.thinker_tokens,
            talker_tokens=self.talker_tokens,
            host_tokens=self.host_tokens,
            header_tokens=self.header_tokens,
            thinker_policy=THINKER.changed({"urgency.beta": self.kv_weight}),
            thinker_reserves_all=self.reserve_all,
            overlap=self.overlap,
            max_running_requests=self.max_running_requests,
            vocoder=VocoderConfig(max_batch=self.vocoder_batch),
            speculate_ms=self.speculate_ms or None,
        )

    @property
    def users(self) -> UserSettings:
        return UserSettings(
            frames_per_token=self.frames_per_token,
            reply_scale=self.reply_scale,
            timeout_s=60.0 * max(1.0, self.reply_scale),
            longest=History(self.history_tokens, 0, has_kv=False),
        )

    def with_sessions(self, *sessions: int) -> "SimulateConfig":
        return replace(self, sessions=sessions)


def parse_args(argv: list[str] | None = None) -> SimulateConfig:
    parser = _parser()
    try:
        return SimulateConfig(**vars(parser.parse_args(argv)))
    except (ValueError, BadInputError) as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    own = SimulateConfig()
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.simulate",
        description="Voice sessions on a modelled device, simulated with the server's policies.",
    )
    add = parser.add_argument
    add(
        "--policies",
        type=_names,
        default=own.policies,
        metavar="ARM,ARM",
        help="stock, off, all or a+b",
    )
    add("--sessions", type=_numbers, default=own.sessions, metavar="N,N", help="users")
    add("--turns", type=int, default=own.turns, help="per user (default: %(default)s)")
    add("--barge-in", type=_shares, default=own.barge_in, metavar="P,P", help="one load each")
    add("--repeats", type=int, default=own.repeats, help="seeds (default: %(default)s)")
    add("--seed", type=int, default=own.seed, help="default: %(default)s")
    add("--device-model", type=Path, default=own.device_model, metavar="FILE")
    add("--devices", type=int, default=own.devices, help="1: shared by all stages; 3: one each")
    add("--sharing", choices=SHARINGS, default=own.sharing, help="of a device by processes")
    add("--thinker-tokens", type=int, default=own.thinker_tokens, metavar="N", help="KV pool")
    add("--talker-tokens", type=int, default=own.talker_tokens, metavar="N", help="KV pool")
    add("--host-tokens", type=int, default=own.host_tokens, metavar="N", help="on the host")
    add("--header-tokens", type=int, default=own.header_tokens, metavar="N", help="instructions")
    add("--history-tokens", type=int, default=own.history_tokens, metavar="N", help="at most")
    add("--kv-weight", type=float, default=own.kv_weight, metavar="X", help="of U2, in the thinker")
    add("--reserve-all", action="store_true", help="room of whole responses, in the thinker")
    add("--disable-overlap-schedule", dest="overlap", action="store_false", help="as the server's")
    add("--max-running-requests", type=int, default=own.max_running_requests, metavar="N")
    add("--vocoder-batch", type=int, default=own.vocoder_batch, metavar="N", help="chunks")
    add("--frames-per-token", type=float, default=own.frames_per_token, metavar="X")
    add("--reply-scale", type=float, default=own.reply_scale, metavar="X")
    add("--reply-durations", type=Path, default=own.reply_durations, metavar="FILE")
    add("--arrive-s", type=float, default=own.arrive_s, metavar="S", help="users come in this time")
    add(
        "--arrival-shape",
        type=float,
        default=own.arrival_shape,
        metavar="K",
        help="below 1: bursts",
    )
    add("--trace-arrivals", action="store_true", help="in the bursts of a service's trace")
    add("--storm", type=StormSpec.parse, metavar="N:PERIOD_S:CLIP_S", help="long messages beside")
    add("--against", type=Path, metavar="DOCUMENT", help="compare with a voice_load of the engine")
    add("--speculate-ms", type=int, default=own.speculate_ms, metavar="MS", help="0: off")
    add("--speech-pauses", type=float, default=own.speech_pauses, metavar="X", help="per second")
    add("--pauses-s", type=float, default=own.pauses_s, metavar="S", help="of the host, mean time")
    add("--of-knee", type=_shares, default=own.of_knee, metavar="X,X", help="shares, as --sessions")
    add("--frontier", action="store_true", help="search how many users each arm serves")
    add("--json", type=Path, metavar="FILE", help="write the tables' numbers")
    add("--picture", type=Path, metavar="FILE", help="draw the curves (matplotlib)")
    return parser


def _names(value: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in value.split(","))


def _numbers(value: str) -> tuple[int, ...]:
    return tuple(int(number) for number in value.split(","))


def _shares(value: str) -> tuple[float, ...]:
    return tuple(float(number) for number in value.split(","))
