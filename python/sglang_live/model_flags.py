"""Checks of flags against the model: stages that it has, ranks, and memory for its KV.

In: settings and a model. Out: BadInputError, before a stage starts.
"""

from pathlib import Path

import psutil

from sglang_live.config import ServerConfig
from sglang_live.devices import n_cuda_devices
from sglang_live.errors import BadInputError
from sglang_live.models.family import ModelFacts, family_at

_GIB = 1 << 30
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_FLOAT32_BYTES = 4  # of engines on the CPU, unless a flag says otherwise


def check_flags(config: ServerConfig, model: ModelFacts) -> None:
    """Raises BadInputError for flags of stages that the model does not have."""
    for name, stage in config.stages.items():
        if name not in model.stages and stage.flags:
            raise BadInputError(f"{stage.flags[0]}: this model has no {name}")
    for addition in config.additions:
        addition.check(model)
    of_thinker = {
        "--cpu-weights": config.stage_options.cpu_weights,
        "--session-storage": config.session_storage.directory,
        "--speculate-ms": config.scheduling.speculate_ms,
        "--speaker-model": config.speaker_model,
    }
    for flag, value in of_thinker.items():
        if value and not model.has_thinker:
            raise BadInputError(f"{flag}: this model only speaks, it has no thinker")


def check_sizes(config: ServerConfig, model: ModelFacts) -> None:
    """Raises BadInputError for more ranks or memory than there can be."""
    for name, stage in config.stages.items():
        if name in model.stages and not stage.connect:
            n_ranks = stage.args.get("tp_size", 1)
            family_at(model.family).check_ranks(model.path, name, f"--{name}.tp-size", n_ranks)
    thinker = config.stages.get("thinker")
    if thinker is not None and not thinker.connect:
        _check_memory(config, model)


def _check_memory(config: ServerConfig, model: ModelFacts) -> None:
    """On the CPU; on a GPU the engine knows what is left of its memory."""
    args = config.stages["thinker"].args
    n_tokens = args.get("max_total_tokens") or 0
    hicache_gb = args.get("hicache_size")
    check_fits(f"--thinker.hicache-size {hicache_gb}", (hicache_gb or 0) * 1e9)
    if not {"dtype", "kv_cache_dtype"} & args.keys():
        n_bytes = n_tokens * model.kv_values * _FLOAT32_BYTES
        check_fits(f"--thinker.max-total-tokens {n_tokens}", n_bytes, without_gpu=True)


def check_fits(flag: str, n_bytes: float, *, without_gpu: bool = False) -> None:
    """Raises BadInputError for more memory than this machine has.

    without_gpu: it is of the host only on a machine without a GPU.
    """
    most = memory_bytes()
    if n_bytes > most and not (without_gpu and n_cuda_devices()):
        raise BadInputError(
            f"{flag}: it takes {n_bytes / _GIB:.0f} GiB, and this machine has "
            f"{most / _GIB:.0f} GiB of memory"
        )


def memory_bytes() -> int:
    """Of this machine, or of this container."""
    total = int(psutil.virtual_memory().total)
    try:
        limit = _CGROUP_LIMIT.read_text("utf-8").strip()
    except OSError:  # not a control group of this kind
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


def available_bytes() -> int:
    """Memory that is free, or can be freed without a loss."""
    return min(int(psutil.virtual_memory().available), memory_bytes())
