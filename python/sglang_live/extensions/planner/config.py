"""Flags of sglang_live.extensions.planner. Only this file reads argv."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from sglang_live.errors import BadInputError
from sglang_live.extensions.planner.device_model.model import DeviceModel, load_device_model
from sglang_live.extensions.planner.hardware import Gpu, ModelSizes, gpu_of, model_of
from sglang_live.extensions.planner.pattern import TalkPattern
from sglang_live.extensions.planner.simulation.frontier import Slo

# One server is one process: its gateway takes 5.5 ms of a core per second of a session
# (benchmark/notes/parts.md, gateway_cost), so that a core is full with 180.
SESSIONS_PER_SERVER = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """
    n_gpus: to be planned for.
    price: of one GPU for an hour; None: not known.
    sessions_per_hour: that begin in the busiest hour; None: not known.
    hours: of a day in which the GPUs are paid for.
    sessions_per_server: that one server process carries.
    """

    gpu: Gpu
    model: DeviceModel
    sizes: ModelSizes
    model_path: str
    n_gpus: int
    slo: Slo
    pattern: TalkPattern
    price: float | None = None
    sessions_per_hour: float | None = None
    hours: float = 24.0
    sessions_per_server: int = SESSIONS_PER_SERVER
    json: bool = False

    def __post_init__(self) -> None:
        if self.n_gpus < 1 or self.sessions_per_server < 1:
            raise BadInputError("--gpus and --sessions-per-server are at least 1")
        if not 0 < self.slo.first_audio_ms < math.inf or not 0 < self.slo.continuous <= 1:
            raise BadInputError("--first-audio-ms is positive, --continuous a share up to 1")
        for flag, value in (
            ("--price", self.price),
            ("--sessions-per-hour", self.sessions_per_hour),
        ):
            if value is not None and not 0 < value < math.inf:
                raise BadInputError(f"{flag} must be positive, got {value:g}")
        if not 0 < self.hours <= 24:
            raise BadInputError(f"--hours is a number up to 24, got {self.hours:g}")


def parse_args(argv: list[str] | None = None) -> PlanConfig:
    """argparse exits for invalid values."""
    parser = _parser()
    own = parser.parse_args(argv)
    try:
        return _config(own)
    except BadInputError as error:
        parser.error(str(error))


def _config(own: argparse.Namespace) -> PlanConfig:
    if own.device_model is None:
        gpu = gpu_of(own.gpu)
    elif own.gpu_gib is None or not 0 < own.gpu_gib < math.inf:
        raise BadInputError("--device-model needs --gpu-gib, the memory of an empty GPU")
    else:
        gpu = Gpu(name=own.gpu, free_gib=own.gpu_gib, device_model=own.device_model)
    return PlanConfig(
        gpu=gpu,
        model=load_device_model(gpu.device_model),
        sizes=model_of(own.model_path),
        model_path=own.model_path,
        n_gpus=own.gpus,
        slo=Slo(first_audio_ms=own.first_audio_ms, continuous=own.continuous),
        pattern=TalkPattern(
            talk_s=own.talk_s,
            response_s=own.response_s,
            interruptions=own.interruptions,
            session_min=own.session_min,
            frames_per_token=own.frames_per_token,
            header_tokens=own.header_tokens,
        ),
        price=own.price,
        sessions_per_hour=own.sessions_per_hour,
        hours=own.hours,
        sessions_per_server=own.sessions_per_server,
        json=own.json,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_live.extensions.planner",
        description="Placement, flags, users, memory and cost for a load, by simulation.",
    )
    add = parser.add_argument
    add("--model-path", default="/models/Qwen3-Omni-30B-A3B-Instruct", help="as launch_server's")
    add("--gpu", default="h100", metavar="NAME", help="h100 or h200 (default: %(default)s)")
    add("--gpus", type=int, default=1, metavar="N", help="default: %(default)s")
    add("--device-model", type=Path, metavar="FILE", help="of another GPU, with --gpu-gib")
    add("--gpu-gib", type=float, metavar="GIB", help="memory of that GPU while it is empty")
    add("--price", type=float, metavar="X", help="of a GPU for an hour, in any currency")
    _add_slo(parser.add_argument_group("target"))
    _add_pattern(parser.add_argument_group("how users talk"))
    add(
        "--sessions-per-server",
        type=int,
        default=SESSIONS_PER_SERVER,
        metavar="N",
        help="that one server process carries (default: %(default)s)",
    )
    add("--json", action="store_true", help="print JSON")
    return parser


def _add_slo(group: argparse._ArgumentGroup) -> None:
    slo, add = Slo(), group.add_argument
    add(
        "--first-audio-ms",
        type=float,
        default=slo.first_audio_ms,
        metavar="MS",
        help="P90 from the detected end of a turn (default: %(default)g)",
    )
    add(
        "--continuous",
        type=float,
        default=slo.continuous,
        metavar="SHARE",
        help="of responses without an audible gap (default: %(default)g)",
    )


def _add_pattern(group: argparse._ArgumentGroup) -> None:
    own, add = TalkPattern(), group.add_argument
    for flag, metavar, text in (
        ("talk-s", "S", "of a user's turn, on average"),
        ("response-s", "S", "of a response, on average"),
        ("interruptions", "SHARE", "of responses that the user interrupts"),
        ("session-min", "MIN", "of a session"),
        ("frames-per-token", "X", "codec frames for a token of text"),
    ):
        default = getattr(own, flag.replace("-", "_"))
        help_text = f"{text} (default: %(default)g)"
        add(f"--{flag}", type=float, default=default, metavar=metavar, help=help_text)
    add("--header-tokens", type=int, default=own.header_tokens, metavar="N", help="instructions")
    add(
        "--sessions-per-hour",
        type=float,
        metavar="N",
        help="that begin in the busiest hour: says how many GPUs they need",
    )
    add("--hours", type=float, default=24.0, metavar="H", help="of a day that GPUs are paid for")
