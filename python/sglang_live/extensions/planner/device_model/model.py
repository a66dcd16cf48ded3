"""A device model: the costs of a model's stages on a kind of device, read from a TOML file.

    name = "…"
    n_devices = 8

    [thinker]
    decode_fixed_ms = { value = 7.0, source = "where the figure comes from" }

and so on for every field of the classes in costs.py. A figure without a publication or a
derivation has a source that begins with "estimate". A file without a thinker is of a model that
speaks text, or hears while it speaks: it says the device's memory instead of copies and devices.
"""

import hashlib
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from sglang_live.errors import BadInputError
from sglang_live.extensions.planner.device_model.costs import (
    EagerCosts,
    LinkCosts,
    TalkerCosts,
    ThinkerCosts,
    VocoderCosts,
)

# Files of devices that come with the package.
H100 = Path(__file__).with_name("h100_qwen3_omni.toml")
H200 = Path(__file__).with_name("h200_qwen3_omni.toml")
_SECTIONS = {
    "thinker": ThinkerCosts,
    "talker": TalkerCosts,
    "vocoder": VocoderCosts,
    "link": LinkCosts,
}
_MEMORY = ("memory_gb", "weights_gb", "spare_gb")
_CUDA = re.compile(r"cuda(?::(\d+))?")
_Costs = TypeVar("_Costs", ThinkerCosts, TalkerCosts, VocoderCosts, LinkCosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """
    Attributes:
        name: of the device and the model.
        n_devices: devices of a host.
        digest: of the file, the first 12 hexadecimal digits of its SHA-256.
        estimates: figures whose source is an estimate, as "section.figure".
    """

    name: str
    n_devices: int
    digest: str
    estimates: tuple[str, ...]
    thinker: ThinkerCosts
    talker: TalkerCosts
    vocoder: VocoderCosts
    link: LinkCosts

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise ValueError("name must be a text")
        if type(self.n_devices) is not int or self.n_devices < 1:
            raise ValueError(f"n_devices must be a whole number from 1, got {self.n_devices!r}")

    def check_device(self, device: str) -> None:
        """Raises ValueError if the model has no such device, such as cuda:8."""
        found = _CUDA.fullmatch(device)
        if found is None or int(found[1] or 0) >= self.n_devices:
            last = self.n_devices - 1
            known = "cuda:0" if last == 0 else f"cuda:0 to cuda:{last}"
            raise ValueError(f"there is no device {device!r}: {self.name} has {known}")

    def facts(self) -> dict[str, Any]:
        """What a document of results says of the device."""
        return _facts(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechModel:
    """A model without a thinker on a device. Attributes: see DeviceModel.

    Attributes:
        memory_gb: of the device. weights_gb, spare_gb: those of it that are no KV.
        encoder: of what the user says; None: it does not hear.
        eager: of the vocoder; None: nothing beside its costs.
    """

    name: str
    digest: str
    estimates: tuple[str, ...]
    memory_gb: float
    weights_gb: float
    spare_gb: float
    talker: TalkerCosts
    vocoder: VocoderCosts
    encoder: VocoderCosts | None
    eager: EagerCosts | None

    def facts(self) -> dict[str, Any]:
        """See DeviceModel.facts."""
        return _facts(self)

    def kv_tokens(self, memory_gb: float) -> int:
        """That fit beside the rest in this memory."""
        left_gb = memory_gb - self.weights_gb - self.spare_gb
        return max(0, int(left_gb * 1e9 / self.talker.kv_token_bytes))


def _facts(model: DeviceModel | SpeechModel) -> dict[str, Any]:
    return {
        "modelled_device": model.name,
        "file_sha256": model.digest,
        "estimates": list(model.estimates),
    }


def load_device_model(path: Path) -> DeviceModel:
    """
    Raises:
        BadInputError: the file cannot be read, or is no device model of a model with a thinker.
            Names the file and the fault.
    """
    found = load_any_model(path)
    if isinstance(found, SpeechModel):
        raise BadInputError(
            f"device model {path}: missing: thinker. It is of a model that only speaks, for "
            "python -m sglang_live.extensions.planner and benchmark.speaking"
        )
    return found


def load_speech_model(path: Path) -> SpeechModel:
    """Raises BadInputError as load_device_model does, for a model with a thinker."""
    found = load_any_model(path)
    if isinstance(found, DeviceModel):
        raise BadInputError(f"device model {path}: it has a thinker: use benchmark.simulate")
    return found


def load_any_model(path: Path) -> DeviceModel | SpeechModel:
    """Raises BadInputError: the file cannot be read, or is no device model."""
    try:
        data = path.read_bytes()
        document, digest = tomllib.loads(data.decode()), hashlib.sha256(data).hexdigest()[:12]
        if "memory_gb" in document:
            return _speech_model(document, digest)
        return _model(document, digest)
    except OSError as error:
        raise BadInputError(f"device model {path}: {error.strerror or error}") from error
    except ValueError as error:  # not UTF-8, not TOML, or a fault named below
        raise BadInputError(f"device model {path}: {error}") from error


def _model(document: dict[str, Any], digest: str) -> DeviceModel:
    _check_keys("", document, {"name", "n_devices", *_SECTIONS})
    sources: dict[str, str] = {}
    return DeviceModel(
        name=document["name"],
        n_devices=document["n_devices"],
        digest=digest,
        thinker=_section(ThinkerCosts, "thinker", document, sources),
        talker=_section(TalkerCosts, "talker", document, sources),
        vocoder=_section(VocoderCosts, "vocoder", document, sources),
        link=_section(LinkCosts, "link", document, sources),
        estimates=_estimates(sources),
    )


def _speech_model(document: dict[str, Any], digest: str) -> SpeechModel:
    hears = "encoder" in document
    sections = {"talker", "vocoder", *(["encoder"] if hears else [])}
    _check_keys("", document, {"name", *_MEMORY, *sections})
    if not isinstance(document["name"], str) or not document["name"].strip():
        raise ValueError("name must be a text")
    sources: dict[str, str] = {}
    memory: dict[str, float] = {}
    for name in _MEMORY:
        memory[name], sources[name] = _figure(name, document[name])
        if not 0 < memory[name] < math.inf:
            raise ValueError(f"{name} must be positive, got {memory[name]}")
    return SpeechModel(
        name=document["name"],
        digest=digest,
        talker=_section(TalkerCosts, "talker", document, sources),
        vocoder=_section(VocoderCosts, "vocoder", document, sources),
        encoder=_section(VocoderCosts, "encoder", document, sources) if hears else None,
        eager=None,  # no file has it: see benchmark/speaking_models.py
        estimates=_estimates(sources),
        **memory,
    )


def _estimates(sources: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(n for n, source in sources.items() if source.lower().startswith("estimate"))


def _section(
    kind: type[_Costs], name: str, document: dict[str, Any], sources: dict[str, str]
) -> _Costs:
    table = document[name]
    if not isinstance(table, dict):
        raise ValueError(f"[{name}] must be a table")
    names = [field.name for field in fields(kind)]
    _check_keys(f"{name}.", table, set(names))
    values: dict[str, float] = {}
    for key in names:
        values[key], sources[f"{name}.{key}"] = _figure(f"{name}.{key}", table[key])
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{name}.{error}") from None


def _figure(name: str, entry: Any) -> tuple[float, str]:
    if not isinstance(entry, dict):
        raise ValueError(f'{name} must be {{ value = …, source = "…" }}, got {entry!r}')
    _check_keys(f"{name}.", entry, {"value", "source"})
    value, source = entry["value"], entry["source"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}.value must be a number, got {value!r}")
    if not isinstance(source, str) or not source.strip():
        raise ValueError(f"{name}.source must say where the figure comes from")
    return float(value), source


def _check_keys(where: str, found: dict[str, Any], expected: set[str]) -> None:
    if unknown := sorted(found.keys() - expected):
        raise ValueError(f"unknown: {', '.join(where + key for key in unknown)}")
    if missing := sorted(expected - found.keys()):
        raise ValueError(f"missing: {', '.join(where + key for key in missing)}")
