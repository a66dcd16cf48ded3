"""Devices of a stage's replicas and of the ranks in each.

In: `--STAGE.device` as typed, the number of replicas, an engine's arguments. Out: one device per
replica, or BadInputError that names the flag. torch is not imported: the server's own process
has no use for it.
"""

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from sglang_live.errors import BadInputError, LiveError

# Without CUDA it means the CPU, on which every stage then runs.
DEFAULT_DEVICE = "cuda:0"
_NAME = re.compile(r"cpu|cuda(:\d+)?")
_COUNT = "import torch; print(torch.cuda.device_count())"  # makes no context


def read_devices(flag: str, text: str | None) -> tuple[str, ...]:
    """`cuda:4,cuda:5` -> ("cuda:4", "cuda:5"); `cuda` is `cuda:0`. Raises BadInputError."""
    names = [name.strip() for name in (text or "").split(",")]
    for name in names:
        if not _NAME.fullmatch(name):
            raise BadInputError(
                f"{flag}: device must be a name such as cuda:0, or a list of them, got {text!r}"
            )
    return tuple(DEFAULT_DEVICE if name == "cuda" else name for name in names)


def devices_of_ranks(device: str, engine_args: Mapping[str, Any]) -> tuple[str, ...]:
    """Devices of all ranks of an engine on this host, from the replica's own device on."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return (device,)
    n_ranks = engine_args.get("tp_size", 1) * engine_args.get("pp_size", 1)
    n_here = max(1, n_ranks // engine_args.get("nnodes", 1))
    step = engine_args.get("gpu_id_step", 1)
    return tuple(f"{kind}:{int(index) + step * rank}" for rank in range(n_here))


def devices_of_replicas(
    flag: str, listed: tuple[str, ...], n_replicas: int | None, engine_args: Mapping[str, Any]
) -> tuple[str, ...]:
    """The device of each replica. One that is listed alone is shared by all replicas.

    Args:
        n_replicas: None: one for each listed device.
    Raises:
        BadInputError: as many devices as replicas are needed, and two replicas share none.
    """
    if len(listed) == 1:
        return listed * (n_replicas or 1)
    if n_replicas not in (None, len(listed)):
        raise BadInputError(
            f"{flag} names {len(listed)} devices for {n_replicas} replicas: name one device for "
            "each, or a single one that all of them share"
        )
    ranks = [devices_of_ranks(device, engine_args) for device in listed]
    for (a, first), (b, second) in combinations(enumerate(ranks), 2):
        if shared := sorted(set(first) & set(second)):
            raise BadInputError(
                f"{flag}: replica {a} has {_span(first)} and replica {b} has {_span(second)}: "
                f"both would use {shared[0]}"
            )
    return listed


class UsedDevices(NamedTuple):
    """Of one replica.

    ranks: devices of all its ranks. named: by a flag, not by default.
    """

    flag: str
    ranks: tuple[str, ...]
    named: bool


def check_devices(replicas: Iterable[UsedDevices]) -> None:
    """Raises BadInputError for a device that does not exist, unless none was named."""
    on_cuda = [used for used in replicas if used.ranks[0] != "cpu"]
    if all(not used.named and used.ranks == (DEFAULT_DEVICE,) for used in on_cuda):
        return
    n_devices = n_cuda_devices()
    for flag, ranks, named in on_cuda:
        if not n_devices and named:
            raise BadInputError(
                f"{flag}: there is no device {ranks[0]}: this machine has no CUDA device that "
                "PyTorch can use; leave the flag out, and the stage runs on the CPU"
            )
        lacking = [device for device in ranks if int(device.partition(":")[2]) >= n_devices]
        if n_devices and lacking:
            raise BadInputError(
                f"{flag}: there is no device {lacking[0]}: this machine has {n_devices}, "
                f"{_span(tuple(f'cuda:{i}' for i in range(n_devices)))}"
            )


def may_have_gpu() -> bool:
    """Whether the system has a GPU of NVIDIA; found without the seconds that PyTorch takes to say
    whether it can use it."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def n_cuda_devices() -> int:
    """CUDA devices that the engines' PyTorch sees, also by CUDA_VISIBLE_DEVICES."""
    asked = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, encoding="utf-8")
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["no output"])[-1]
        raise LiveError(f"cannot count CUDA devices: {last}")
    return int(asked.stdout)


def _span(devices: tuple[str, ...]) -> str:
    return devices[0] if len(devices) == 1 else f"{devices[0]} to {devices[-1]}"
