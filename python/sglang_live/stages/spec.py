"""Configuration of a stage: settings of all its replicas, and the spec of one stage process, which
is one JSON document in its environment."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from sglang_live.devices import DEFAULT_DEVICE
from sglang_live.policy.policies import OFF, Policies
from sglang_live.settings import Positive, Settings, flag
from sglang_live.stages.run_dir import run_of

SPEC_ENV = "SGLANG_LIVE_SPEC"
# Longer than a kernel takes to compile, and than any user waits.
STUCK_AFTER_S = 120.0
STAGES = ("thinker", "talker", "vocoder")
# Grants a device that several of them share.
ARBITER = "arbiter"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """Settings of one stage.

    replicas: number of processes.
    devices: of each replica, the device of its first rank.
    names_devices: a flag does, for this stage or for all.
    connect: addresses of running stages; empty: this server starts the replicas itself.
    args: SGLang's server arguments, or fields of VocoderConfig.
    flags: that were given for this stage alone, as `--thinker.device`.
    """

    replicas: int = 1
    devices: tuple[str, ...] = (DEFAULT_DEVICE,)
    names_devices: bool = False
    connect: tuple[str, ...] = ()
    args: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions(Settings):
    """Of all stages, on this host and on others."""

    cpu_weights: Literal["", "own", "int8"] = flag(
        "",
        "on a CPU, the thinker's weights: as in the checkpoint, or in 8 bits, several times as "
        "fast",
        unset="int8 for cascade, own for others",
        group="what to serve",
    )
    stuck_after_s: Positive = flag(
        STUCK_AFTER_S,
        "restart an engine that has work and completes no round of it for this time",
    )
    stage_key_file: str = flag(
        "", "secret shared with stages on other hosts, at least 32 bytes, mode 600"
    )
    allow_keyless_stages: bool = flag(False, "stages on other hosts without --stage-key-file")


class StageSpec(msgspec.Struct, frozen=True, kw_only=True):
    """
    stage: one of STAGES, or a name of an extension.
    family: module of the model's family (models/family.py).
    address: endpoint to bind.
    same_host: whether the server shares this machine's memory.
    run_dir: directory for sockets, and for what stages of one server share.
    engine_args: SGLang's server arguments (thinker, talker), or fields of VocoderConfig, or
        arguments of an extension's stage.
    environment: added to the process's own.
    parts: "module:factory" of further parts of the engine's scheduler.
    factory: "module:class" of a stage that is none of STAGES. "": it is one of them.
    shares_device: whether another stage of the server uses one of its devices.
    turns: socket of the arbiter of its device (stages/device_arbiter.py). "": there is none.
    policies: those that are on.
    session_storage: "<bytes>:<directory>" for KV that exceeds a thinker's host memory. "": none.
    remote: whether it is started on another host; the server only connects to it.
    alone: whether no supervisor has started it, with which it would end.
    key_file: secret shared with a stage on another host (transport/stage_key.py). "": none.
    native_key: key of SGLang's own HTTP API, served on native_socket. "": it is not served.
    voices: directory of recordings whose voices the stage takes on. "": none.
    log_format: "text" or "json".
    stuck_after_s: seconds without a round after which an engine with work is started anew.
    """

    stage: str
    replica: int
    model_path: str
    family: str
    cache_dir: str
    address: str
    same_host: bool
    run_dir: str
    served_name: str
    device: str = "cpu"
    shares_device: bool = False
    turns: str = ""
    native_key: str = ""
    key_file: str = ""
    engine_args: dict[str, Any] = {}
    environment: dict[str, str] = {}
    parts: tuple[str, ...] = ()
    factory: str = ""
    policies: Policies = OFF
    session_storage: str = ""
    remote: bool = False
    alone: bool = False
    voices: str = ""
    log_format: str = "text"
    stuck_after_s: float = STUCK_AFTER_S

    @property
    def name(self) -> str:
        return f"{self.stage}/{self.replica}"

    @property
    def run(self) -> str:
        """The run of the server, or of a stage that is started by itself."""
        return run_of(Path(self.run_dir))

    def socket_path(self, what: str) -> str:
        return f"ipc://{Path(self.run_dir) / f'{self.stage}-{self.replica}-{what}'}"

    @property
    def native_socket(self) -> str:
        """A Unix socket in run_dir, which other users of the machine cannot read (mode 0700)."""
        return str(self.file_path("native"))

    def file_path(self, what: str) -> Path:
        return Path(self.run_dir) / f"{self.stage}-{self.replica}-{what}"

    @staticmethod
    def from_env() -> "StageSpec":
        return msgspec.json.decode(os.environ[SPEC_ENV], type=StageSpec)

    def to_env(self) -> str:
        return msgspec.json.encode(self).decode()
