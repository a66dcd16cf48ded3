"""Flags of sglang_live.extensions.planner. Only this file reads argv."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from sglang_live.errors import BadInputError
from sglang_live.extensions.planner.device_model.model import DeviceModel, load_device_model
from sglang_live.extensions.planner.hardware import Gpu, ModelSizes, gpu_of, model_of
from sglang_live.extensions.planner.pattern import TalkPattern
from sglang_live.extensions.planner.simulation.frontier import Slo
from sglang_live.settings import Check, Count, Positive, Settings, flag, flags_of, part, read_flags

# One server is one process: its gateway takes 5.5 ms of a core per second of a session
# (benchmark/notes/parts.md, gateway_cost), so that a core is full with 180.
SESSIONS_PER_SERVER = 150
_Hours = Annotated[float, Check("a number up to 24", lambda v: 0 < v <= 24)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig(Settings):
    """
    gpu, model, sizes: what the first flags name.
    """

    model_path: str = flag(
        "/models/Qwen3-Omni-30B-A3B-Instruct", "as launch_server's", value="PATH"
    )
    gpu_name: str = flag("h100", "h100 or h200", name="gpu", value="NAME")
    n_gpus: Count = flag(1, "to be planned for", name="gpus")
    device_model: Path | None = flag(None, "of another GPU, with --gpu-gib", value="FILE")
    gpu_gib: Positive | None = flag(None, "memory of that GPU while it is empty")
    price: Positive | None = flag(None, "of a GPU for an hour, in any currency", value="X")
    sessions_per_server: Count = flag(SESSIONS_PER_SERVER, "that one server process carries")
    json: bool = flag(False, "print JSON")
    slo: Slo = part("target")
    pattern: TalkPattern = part("how users talk")
    sessions_per_hour: Positive | None = flag(
        None,
        "that begin in the busiest hour: says how many GPUs they need",
        value="N",
        group="how users talk",
    )
    hours: _Hours = flag(24.0, "of a day that GPUs are paid for", value="H", group="how users talk")
    gpu: Gpu
    model: DeviceModel
    sizes: ModelSizes


def parse_args(argv: list[str] | None = None) -> PlanConfig:
    """argparse exits for invalid values."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_live.extensions.planner",
        description="Placement, flags, users, memory and cost for a load, by simulation.",
    )
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for one in flags_of(PlanConfig):
        if one.group not in groups:
            groups[one.group] = parser.add_argument_group(one.group)
        one.add_to(groups[one.group])
    own = parser.parse_args(argv)
    try:
        gpu = _gpu(own)
        model, sizes = load_device_model(gpu.device_model), model_of(own.model_path)
        return read_flags(own, PlanConfig, gpu=gpu, model=model, sizes=sizes)
    except BadInputError as error:
        parser.error(str(error))


def _gpu(own: argparse.Namespace) -> Gpu:
    if own.device_model is None:
        return gpu_of(own.gpu)
    if own.gpu_gib is None:
        raise BadInputError("--device-model needs --gpu-gib, the memory of an empty GPU")
    return Gpu(name=own.gpu, free_gib=own.gpu_gib, device_model=Path(own.device_model))
