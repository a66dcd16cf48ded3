"""Where a check runs: the flags and the environment of processes on a device or on the CPU."""

import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from benchmark.gpu.findings import CannotRunError
from sglang_live.stages.spec import STAGES

_HIDING = "CUDA_VISIBLE_DEVICES"


@contextmanager
def on_device(device: str) -> Iterator[tuple[str, ...]]:
    """Flags of a server whose stages compute on the device. On the CPU, GPUs are hidden from
    processes that are started within the context."""
    with gpus_hidden(device == "cpu"):
        stages = () if device == "cpu" else STAGES
        yield tuple(f"--{stage}.device={indexed(device)}" for stage in stages)


def gpus_hidden(hide: bool) -> AbstractContextManager[None]:
    return environment({_HIDING: ""} if hide else {})


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Of processes that are started within the context."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def platform_of(device: str) -> str:
    """The platform of SGLang there: cpu, cuda, or cuda_native (without SGLang's kernels).

    Raises:
        CannotRunError: no SGLang.
    """
    if importlib.util.find_spec("sglang") is None:
        raise CannotRunError("sglang is not installed")
    if device == "cpu":
        return "cpu"
    from sglang_live.bridge.platform import cuda

    return "cuda_native" if cuda.is_active() else "cuda"


def indexed(device: str) -> str:
    """As stages take it: with the index of the GPU."""
    if device == "cpu":
        return device
    return device if ":" in device else f"{device}:0"
