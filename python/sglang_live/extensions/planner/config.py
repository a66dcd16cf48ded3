"""Flags of sglang_live.extensions.planner. Only this file reads argv."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from sglang_live.errors import BadInputError
from sglang_live.extensions.planner.device_model.model import (
    DeviceModel,
    SpeechModel,
    load_any_model,
)
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


# Those of a plan for calls.
_OF_CALLS = ("model-path", "gpu", "gpus", "device-model", "gpu-gib", "price", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallsConfig:
    """For calls of a model that hears while it speaks. Attributes: see PlanConfig."""

    model_path: str
    n_gpus: int
    price: float | None
    json: bool
    gpu: Gpu
    model: SpeechModel

    @property
    def memory_gb(self) -> float:
        return self.gpu.free_gib * (1 << 30) / 1e9


def parse_args(argv: list[str] | None = None) -> PlanConfig | CallsConfig:
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
        model = load_any_model(gpu.device_model)
        if isinstance(model, SpeechModel):
            return _of_calls(own, gpu, model)
        sizes = model_of(own.model_path)
        return read_flags(own, PlanConfig, gpu=gpu, model=model, sizes=sizes)
    except BadInputError as error:
        parser.error(str(error))


def _of_calls(own: argparse.Namespace, gpu: Gpu, model: SpeechModel) -> CallsConfig:
    """Raises BadInputError for flags about turns, and for a model that hears nothing."""
    if model.encoder is None:
        raise BadInputError(
            f"--device-model {gpu.device_model}: this model hears nothing: its requests are "
            "simulated by benchmark.speaking"
        )
    for one in flags_of(PlanConfig):
        given = one.value_in(own)
        if one.name == "model-path" and given == one.default:
            raise BadInputError(f"--model-path must name the model of {gpu.device_model}")
        if one.name not in _OF_CALLS and given != one.default:
            raise BadInputError(f"--{one.name} is about turns, which {model.name} does not have")
    return CallsConfig(
        model_path=own.model_path,
        n_gpus=own.gpus,
        price=own.price,
        json=own.json,
        gpu=gpu,
        model=model,
    )


def _gpu(own: argparse.Namespace) -> Gpu:
    if own.device_model is None:
        return gpu_of(own.gpu)
    if own.gpu_gib is None:
        raise BadInputError("--device-model needs --gpu-gib, the memory of an empty GPU")
    return Gpu(name=own.gpu, free_gib=own.gpu_gib, device_model=Path(own.device_model))
