"""A device model: the costs of a model's stages on a kind of device, read from a TOML file.

    name = "…"
    n_devices = 8

    [thinker]
    decode_fixed_ms = { value = 7.0, source = "where the figure comes from" }

and so on for every field of the classes in costs.py. A figure without a publication or a
derivation has a source that begins with "estimate".
"""

import hashlib
import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from sglang_live.errors import BadInputError
from sglang_live.extensions.planner.device_model.costs import (
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
        return {
            "modelled_device": self.name,
            "file_sha256": self.digest,
            "estimates": list(self.estimates),
        }


def load_device_model(path: Path) -> DeviceModel:
    """
    Raises:
        BadInputError: the file cannot be read, or is no device model. Names the file and the fault.
    """
    try:
        data = path.read_bytes()
        return _model(tomllib.loads(data.decode()), hashlib.sha256(data).hexdigest()[:12])
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
        estimates=tuple(
            n for n, source in sources.items() if source.lower().startswith("estimate")
        ),
    )


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
