"""The server of a document of voice_load, from the flags that it was started with.

A flag that changes what a server does is simulated or refused.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from sglang_live.config import Scheduling
from sglang_live.extensions.planner.device_model.model import DeviceModel
from sglang_live.extensions.planner.simulation.placement import APART, SHARED, Placement
from sglang_live.extensions.planner.simulation.spec import HostTimes, ServerSpec
from sglang_live.stages.spec import STAGES
from sglang_live.stages.vocoder.config import VocoderConfig

# What a server on a CPU sets (stages/engine_host.py, stages/vocoder/stage.py).
_CPU_CHUNK_TOKENS, _CPU_POOL_TOKENS, _CPU_MAX_BATCH = 512, 65_536, 4
# The chat header of voice_load's sessions.
_HEADER_TOKENS = 1
# What a server has without --max-sessions.
_SESSIONS = 64
_ENGINES = ("thinker", "talker")
# They change nothing that is simulated.
_WITHOUT_EFFECT = {"timeline-dir", "log-format", "served-model-name", "vocoder.disable-cuda-graph"}


def server_of(model: DeviceModel, host: HostTimes, args: Sequence[str]) -> ServerSpec:
    """
    Args:
        args: flags as `--name=value`, or `--name`.
    Raises:
        ValueError: naming a flag that is not simulated.
    """
    flags = dict(_read(arg) for arg in args)
    flags = {name: value for name, value in flags.items() if name not in _WITHOUT_EFFECT}
    chunks = _of_engines(flags, "chunked-prefill-size", _CPU_CHUNK_TOKENS)
    if chunks[0] != chunks[1]:
        raise ValueError("--talker.chunked-prefill-size: here both engines have the same")
    thinker_tokens, talker_tokens = _of_engines(flags, "max-total-tokens", _CPU_POOL_TOKENS)
    spec = ServerSpec(
        model=model,
        host=host,
        placement=_placement(flags),
        header_tokens=_HEADER_TOKENS,
        chunk_tokens=chunks[0],
        thinker_tokens=thinker_tokens,
        talker_tokens=talker_tokens,
        overlap=flags.pop("disable-overlap-schedule", None) is None,
        max_running_requests=_number("max-running-requests", flags, 0),
        max_sessions=_number("max-sessions", flags, _SESSIONS),
        vocoder=_vocoder(flags),
        speculate_ms=_speculate_ms(flags),
    )
    if flags:
        raise ValueError(f"not simulated: {', '.join(f'--{name}' for name in flags)}")
    return spec


def _read(arg: str) -> tuple[str, str]:
    name, _, value = arg.partition("=")
    return name.removeprefix("--"), value


def _number(name: str, flags: dict[str, str], default: int) -> int:
    value = flags.pop(name, None)
    if value is None:
        return default
    if not value.isdecimal():
        raise ValueError(f"--{name}={value}: not a number from 0")
    return int(value)


def _speculate_ms(flags: dict[str, str]) -> int | None:
    """As a server whose model hears by itself."""
    chosen = None
    if flags.get("speculate-ms") in ("auto", "off"):
        chosen = None if flags.pop("speculate-ms") == "auto" else 0
    elif "speculate-ms" in flags:
        chosen = _number("speculate-ms", flags, 0)
    return Scheduling(speculate_ms=chosen).speculation_ms(recognises=False)


def _of_engines(flags: dict[str, str], name: str, default: int) -> list[int]:
    """Of thinker and talker: a flag without a stage is of both."""
    both = _number(name, flags, default)
    return [_number(f"{stage}.{name}", flags, both) for stage in _ENGINES]


def _vocoder(flags: dict[str, str]) -> VocoderConfig:
    found: dict[str, Any] = {"max_batch": _CPU_MAX_BATCH}
    for field in fields(VocoderConfig):
        name = f"vocoder.{field.name.replace('_', '-')}"
        if name in flags:
            found[field.name] = _number(name, flags, 0)
    return VocoderConfig(**found)


def _placement(flags: dict[str, str]) -> Placement:
    devices = [flags.pop(f"{stage}.device", "") for stage in STAGES]
    n_devices = len(set(devices))
    if n_devices not in (1, len(STAGES)):
        raise ValueError("--STAGE.device: stages share one device, or have one each")
    return SHARED if n_devices == 1 else APART
