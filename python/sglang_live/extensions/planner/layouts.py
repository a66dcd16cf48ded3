"""Ways to place the stages of one server on its GPUs, and the flags that do it."""

from dataclasses import dataclass

from sglang_live.extensions.planner.memory import MEM_FRACTION, Memory
from sglang_live.extensions.planner.simulation.placement import Placement

# Replicas get room for requests beside the sessions (docs/deploy.md).
_SPARE_REQUESTS = 32
HICACHE_GB = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    name: str
    placement: Placement

    @property
    def n_gpus(self) -> int:
        return self.placement.n_devices


def layouts(n_gpus: int) -> list[Layout]:
    """Those of one server that divide n_gpus evenly among servers.

    A server is one process on one core, which is full long before four GPUs are
    (report.SESSIONS_PER_SERVER), so that servers of more GPUs gain nothing.
    """
    every = [
        Layout(name="all stages on one GPU", placement=Placement()),
        Layout(
            name="talker and vocoder on a GPU of their own",
            placement=Placement(talkers=(1,), vocoders=(1,)),
        ),
        Layout(name="the talker on a GPU of its own", placement=Placement(talkers=(1,))),
        Layout(name="two talkers, each on a GPU of its own", placement=Placement(talkers=(1, 2))),
        Layout(
            name="a thinker on four GPUs, two talkers and two vocoders",
            placement=Placement(thinker_tp=4, talkers=(4, 5), vocoders=(6, 7)),
        ),
    ]
    return [layout for layout in every if n_gpus % layout.n_gpus == 0]


def command(
    layout: Layout, memory: Memory, *, model_path: str, first_gpu: int, port: int, sessions: int
) -> list[str]:
    """Arguments of launch_server for one server. first_gpu: its first GPU on its machine."""

    def devices(numbers: tuple[int, ...]) -> str:
        return ",".join(f"cuda:{first_gpu + number}" for number in numbers)

    placement = layout.placement
    thinker = {
        "device": devices(placement.thinkers),
        "mem-fraction-static": MEM_FRACTION,
        "max-total-tokens": memory.thinker_tokens,
        "hicache-size": HICACHE_GB,
    }
    if placement.thinker_tp > 1:
        thinker["tp-size"] = placement.thinker_tp
    if memory.fp8:
        thinker["quantization"] = "fp8"
    talker = {
        "device": devices(placement.talkers),
        "mem-fraction-static": MEM_FRACTION,
        "max-total-tokens": memory.talker_tokens,
        "max-running-requests": _rows(sessions, len(placement.talkers)),
    }
    vocoder = {
        "device": devices(placement.vocoders),
        "max-streams": _rows(sessions, len(placement.vocoders)),
    }
    argv = ["--model-path", model_path, "--port", str(port), "--max-sessions", str(sessions)]
    argv.append("--thinker.enable-hierarchical-cache")
    for stage, flags in (("thinker", thinker), ("talker", talker), ("vocoder", vocoder)):
        for name, value in flags.items():
            argv += [f"--{stage}.{name}", str(value)]
    return argv


def _rows(sessions: int, n_replicas: int) -> int:
    return -(-sessions // n_replicas) + _SPARE_REQUESTS
