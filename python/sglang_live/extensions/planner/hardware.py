"""GPUs and models that can be planned for, and what of a GPU's memory is taken.

Sizes in GiB. A GPU needs a device model (benchmark/notes/device_model.md), which says what the
stages cost on it; its figures are of the thinker in bf16.
"""

from dataclasses import dataclass
from pathlib import Path

from sglang_live.errors import BadInputError
from sglang_live.extensions.planner.device_model.model import H100, H200


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """
    free_gib: of an empty GPU.
    device_model: its file.
    """

    name: str
    free_gib: float
    device_model: Path


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="h100", free_gib=78, device_model=H100),
        Gpu(name="h200", free_gib=139, device_model=H200),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Weights by part. Of Qwen3-Omni-30B-A3B: its technical report, table 1.

    thinker_fp8_gib: encoders, vocabulary and head stay in bf16.
    encoders_gib: of thinker_gib; whole on each GPU of a divided thinker.
    talker_gib: with code predictor, the table of the vocabulary, and the rows of its requests.
    process_gib: activations, CUDA graphs and libraries of one stage's process: an estimate.
    """

    name: str
    thinker_gib: float
    thinker_fp8_gib: float
    encoders_gib: float
    talker_gib: float
    vocoder_gib: float
    process_gib: float


QWEN3_OMNI = ModelSizes(
    name="Qwen3-Omni-30B-A3B",
    thinker_gib=59.0,
    thinker_fp8_gib=31.0,
    encoders_gib=2.2,
    talker_gib=6.3,
    vocoder_gib=0.8,
    process_gib=5.0,
)


def gpu_of(name: str) -> Gpu:
    """Raises BadInputError for a GPU without a device model."""
    found = GPUS.get(name.lower())
    if found is None:
        raise BadInputError(
            f"--gpu {name}: there is no device model of it; there are {', '.join(GPUS)}. For "
            "another GPU give --device-model and --gpu-gib (benchmark/notes/device_model.md)"
        )
    return found


def model_of(path: str) -> ModelSizes:
    """Raises BadInputError for a model whose costs and sizes are not known."""
    if QWEN3_OMNI.name.lower() not in Path(path).name.lower():
        raise BadInputError(
            f"--model-path {path}: only {QWEN3_OMNI.name} has device models, and its name must be "
            "in the path's last part"
        )
    return QWEN3_OMNI
