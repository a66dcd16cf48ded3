"""Settings of the server: frozen, checked when they are made. Its parts stand beside their readers.

In: flags (arguments.py). Out: ServerConfig, or BadInputError for invalid values.
"""

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from sglang_live.capacity.control import CapacityConfig
from sglang_live.environment import FolderConfig
from sglang_live.errors import BadInputError
from sglang_live.extension import Addition
from sglang_live.gateway.auth import KeyConfig
from sglang_live.gateway.connection_guard import ConnectionLimits
from sglang_live.gateway.flex.gate import FlexConfig
from sglang_live.gateway.http.media_guard import MediaConfig
from sglang_live.gateway.journal_flags import JournalConfig
from sglang_live.gateway.listen_socket import ListenConfig
from sglang_live.gateway.live.text_server import TextServerConfig
from sglang_live.gateway.rate_limits import ClientLimits
from sglang_live.gateway.telephony.config import TelephonyConfig
from sglang_live.gateway.webrtc.config import WebRtcConfig
from sglang_live.kv.retention import RetentionConfig, RetentionFlags
from sglang_live.model_source import ModelSource
from sglang_live.models.family import ModelFacts
from sglang_live.policy.policies import ALL, NAMES, Policies
from sglang_live.settings import Check, Seconds, Settings, flag, part
from sglang_live.stages.spec import StageConfig, StageOptions

_GIB = 1 << 30
# Half of the pauses within turns are shorter; half a second of silence ends a turn by default.
_SPECULATE_MS = 200
# A recogniser and a voice take longer than the rest of that silence. Longer than the closures of
# most stop consonants.
_SPECULATE_RECOGNISED_MS = 80
_WholeSeconds = Annotated[
    float, Check("whole seconds, at least 1", lambda v: v >= 1 and float(v).is_integer())
]
_Size = Annotated[
    float, Check("a number of GiB", math.isfinite), Check("positive", lambda v: v > 0)
]


def _speculate_ms(text: str) -> int | None:
    if text in ("auto", "off"):
        return None if text == "auto" else 0
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: positive milliseconds, auto or off")
    return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling(Settings):
    """The policies that are on, and settings of some.

    speculate_ms: 0: there are no speculative turns; None: as `speculation_ms` chooses.
    """

    policies: Policies = flag(
        ALL,
        f"off, all, or some of these, separated by commas: {', '.join(NAMES)}",
        name="live-policies",
        value="NAMES",
        unset="all",
        read=Policies.from_flag,
    )
    speculate_ms: int | None = flag(
        None,
        "start a speculative turn after this much silence if the server has room, and truncate it "
        "if the user goes on",
        value="MS|auto|off",
        unset="auto, 200 with the policy truncate, for a cascade 80",
        read=_speculate_ms,
    )
    turn_prefill_s: _WholeSeconds = flag(
        8.0,
        "length of the pieces in which speech is prefilled while the user goes on speaking; "
        "shorter ones gain more and are less exact, 8 is the encoder's own window",
    )

    def check(self) -> None:
        if self.speculate_ms and not self.policies.truncate:
            raise BadInputError(
                "--speculate-ms needs the policy truncate, which removes speculative turns"
            )

    def speculation_ms(self, *, recognises: bool) -> int | None:
        """Silence after which a speculative turn may start; None: there are none.

        recognises: a recogniser hears for the model.
        """
        if self.speculate_ms is not None:
            return self.speculate_ms or None
        if not self.policies.truncate:
            return None
        return _SPECULATE_RECOGNISED_MS if recognises else _SPECULATE_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStorage(Settings):
    """Space on a disk for the KV of sessions whose users will not speak soon."""

    directory: Path | None = flag(
        None,
        "write KV that does not fit into a thinker's host memory to a file in this folder",
        name="session-storage",
        value="DIR",
    )
    gib: _Size = flag(16.0, "largest size of that file", name="session-storage-gib")

    @property
    def n_bytes(self) -> int:
        return int(self.gib * _GIB)

    def check(self) -> None:
        if self.directory and not self.directory.is_dir():
            raise BadInputError(f"session-storage: there is no directory {self.directory}")

    def check_thinker(self, policies: Policies, args: Mapping[str, Any]) -> None:
        """Raises BadInputError if there is no host memory that could overflow."""
        if self.directory and not (policies.next_use and args.get("enable_hierarchical_cache")):
            raise BadInputError(
                "session-storage holds KV that does not fit into host memory: it needs the policy "
                "next-use and --thinker.enable-hierarchical-cache"
            )

    def to_env(self) -> str:
        """ "": there is none."""
        return f"{self.n_bytes}:{self.directory.resolve()}" if self.directory else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(Settings):
    """Settings of one server, in the order of --help.

    retention: bounds of what sessions keep of long conversations. `kept_by` has those that apply.
    additions: of the extensions whose flags are given.
    """

    model: ModelSource = part("what to serve")
    served_model_name: str = flag(
        "",
        "name for clients, such as gpt-realtime for one with a fixed name",
        value="NAME",
        unset="last part of the path",
        group="what to serve",
    )
    model_alias: tuple[str, ...] = flag(
        (),
        "another name of the model, such as gpt-realtime* or tts-1; repeatable",
        name="model-alias",
        value="PATTERN",
        group="what to serve",
    )
    speaker_model: Literal["resemblyzer"] | None = flag(
        None,
        "tell the user's voice from others over a response (docs/turn_taking.md)",
        unset="none",
        group="what to serve",
    )
    text_server: TextServerConfig = part("delegated work")
    listen: ListenConfig = part("network and keys")
    keys: KeyConfig = part("network and keys")
    media: MediaConfig = part("network and keys")
    webrtc: WebRtcConfig = part("network and keys")
    telephony: TelephonyConfig = part("network and keys")
    scheduling: Scheduling = part("policies")
    capacity: CapacityConfig = part("policies")
    limits: ClientLimits = part("limits")
    connections: ConnectionLimits = part("limits")
    drain_s: Seconds = flag(
        20.0,
        "time for running responses to end after SIGTERM or SIGINT; a second signal ends the "
        "server at once",
        group="limits",
    )
    retention: RetentionFlags = part("memory of sessions")
    session_storage: SessionStorage = part("memory of sessions")
    flex: FlexConfig = part("work in the background")
    journal: JournalConfig = part("sessions at several gateways")
    folders: FolderConfig = part("logs and folders")
    directory: Path | None = flag(
        None,
        "follow the stages of the table in this file, which launch_cluster writes, and start none",
        value="FILE",
        group="stages",
    )
    stage_options: StageOptions = part("stages")
    additions: tuple[Addition, ...] = ()
    stages: dict[str, StageConfig]

    @property
    def policies(self) -> Policies:
        return self.scheduling.policies

    def kept_by(self, model: ModelFacts) -> RetentionConfig | None:
        """What sessions of this model keep; None: everything."""
        if not self.policies.retention or self.retention.window_tokens == 0:
            return None
        args = self.stages["thinker"].args if "thinker" in self.stages else {}
        limits = [args.get("context_length"), args.get("max_total_tokens")]
        limits.append(model.good_tokens or model.context_tokens)
        known = [limit for limit in limits if type(limit) is int and limit > 0]
        return self.retention.suited_to(min(known, default=None))

    def check(self) -> None:
        if not (self.listen.is_loopback or self.keys.api_keys or self.keys.allow_anonymous):
            raise BadInputError(
                f"serving {self.listen.host} without an API key: give --api-key, or "
                "--allow-anonymous"
            )
        if self.directory is not None and (own := self._of_own_stages()):
            raise BadInputError(f"{own}: with --directory the stages are those of its table")
        self.session_storage.check_thinker(self.policies, self.stages["thinker"].args)

    def _of_own_stages(self) -> str:
        """A flag that says which stages this server has, or where. "": none does."""
        given = (flag for stage in self.stages.values() for flag in stage.flags)
        own = (flag for flag in given if flag.endswith((".connect", ".replicas", ".device")))
        named = any(stage.names_devices for stage in self.stages.values())
        return next(own, "--device" if named else "")
