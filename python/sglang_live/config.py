"""Settings of the server: frozen, checked when they are made.

In: values, usually from arguments.py. Out: ServerConfig, or BadInputError for invalid values.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

from sglang_live.environment import cache_directory
from sglang_live.errors import BadInputError
from sglang_live.extension import Addition
from sglang_live.gateway.flex.gate import FlexConfig
from sglang_live.kv.lending import LeaseConfig
from sglang_live.kv.retention import RetentionConfig, RetentionFlags
from sglang_live.model_source import ModelSource
from sglang_live.models.family import ModelFacts
from sglang_live.policy.policies import OFF, Policies
from sglang_live.stages.spec import STUCK_AFTER_S, StageConfig

LOG_FORMATS = ("text", "json")
SPEAKER_MODELS = ("resemblyzer",)
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# One response every two seconds; the turns of a conversation take at least five.
_RESPONSES_PER_MINUTE_OF_A_SESSION = 30
# Half of the pauses within turns are shorter; half a second of silence ends a turn by default.
_SPECULATE_MS = 200
# A recogniser and a voice take longer than the rest of that silence. Longer than the closures of
# most stop consonants.
_SPECULATE_RECOGNISED_MS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStorage:
    """Space on a disk for the KV of sessions whose users will not speak soon.

    directory: folder of the file.
    n_bytes: largest size of the file.
    """

    directory: Path
    n_bytes: int

    def __post_init__(self) -> None:
        if not self.directory.is_dir():
            raise BadInputError(f"session-storage: there is no directory {self.directory}")
        if self.n_bytes < 1:
            raise BadInputError("session-storage-gib must be positive")

    def to_env(self) -> str:
        return f"{self.n_bytes}:{self.directory.resolve()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of one server.

    speaker_model: that tells users' voices from others; None: none does.
    policies: the policies that are on; OFF: SGLang's own scheduling.
    retention: bounds of what sessions keep of long conversations; None: sessions keep everything.
        `kept_by` has those that apply.
    leases: which stages lend or borrow KV memory.
    session_storage: disk space of each thinker; None: KV stays in host memory.
    api_keys: accepted keys; empty: no key is needed.
    batch_only_keys: further ones, for flex requests and batches alone.
    flex: bound on flex requests.
    ssl_keyfile: private key of the certificate; None: it is in ssl_certfile.
    operator_key: key for operations that affect all sessions; None: they are refused.
    first_audio_s: longest time to the first audio of a turn that `admission` accepts.
    turn_prefill_s: length of the pieces in which `turn-prefill` prefills speech, in whole seconds.
    stuck_after_s: time after which an engine that has work and completes no round is restarted.
    drain_s: time for running responses to end when the server is to stop.
    speculate_ms: silence after which a speculative turn may start; 0: there are none; None: as
        `speculation_ms` chooses.
    max_sessions_per_key: as given; `sessions_per_key` is the limit that applies.
    max_sessions_per_secret: sessions that one client secret may have open.
    idle_session_s: silence of a client after which its session is closed; 0: no limit.
    max_connections_per_address: None: twice max_sessions, at least 1,024.
    first_request_s: time for a connection to send the headers of its first request.
    max_responses_per_minute: as given; `responses_per_minute` is the limit that applies.
    log_dir: folder for the stages' logs; None: stderr.
    timeline_dir: folder for a timeline of each session; None: no timelines.
    cpu_weights: of the thinker on a CPU: "int8", or "own", those of the checkpoint; "": as the
        model prefers.
    additions: of the extensions whose flags are given.
    stage_key_file: file of the secret shared with stages on other hosts; "": no such file.
    """

    model: ModelSource
    served_model_name: str
    host: str = "127.0.0.1"
    port: int = 30000
    speaker_model: str | None = None
    policies: Policies = OFF
    retention: RetentionFlags | None = None
    session_storage: SessionStorage | None = None
    leases: LeaseConfig = field(default_factory=LeaseConfig)
    api_keys: tuple[str, ...] = ()
    batch_only_keys: tuple[str, ...] = ()
    flex: FlexConfig = field(default_factory=FlexConfig)
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    operator_key: str | None = None
    allow_anonymous: bool = False
    allow_local_media: bool = False
    allow_private_media_urls: bool = False
    max_sessions: int = 64
    first_audio_s: float = 1.0
    turn_prefill_s: float = 8.0
    stuck_after_s: float = STUCK_AFTER_S
    drain_s: float = 20.0
    speculate_ms: int | None = None
    max_sessions_per_key: int | None = None
    max_sessions_per_secret: int = 4
    idle_session_s: float = 1800.0
    max_connections_per_address: int | None = None
    first_request_s: float = 10.0
    max_responses_per_minute: int | None = None
    cache_dir: Path = field(default_factory=cache_directory)
    log_dir: Path | None = None
    log_format: str = "text"
    timeline_dir: Path | None = None
    cpu_weights: str = ""
    stage_key_file: str = ""
    additions: tuple[Addition, ...] = ()
    stages: dict[str, StageConfig] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65_536:
            raise BadInputError(f"port {self.port} is out of range")
        self._check_counts()
        self._check_times()
        if self.ssl_keyfile and not self.ssl_certfile:
            raise BadInputError("--ssl-keyfile without --ssl-certfile")
        for file in (self.ssl_certfile, self.ssl_keyfile):
            if file and not file.is_file():
                raise BadInputError(f"there is no file {file}")
        self._check_access()

    @property
    def sessions_per_key(self) -> int | None:
        """Sessions of one key. Several keys get three quarters each; None: no limit."""
        if self.max_sessions_per_key is not None or len(self.api_keys) < 2:
            return self.max_sessions_per_key
        return max(1, self.max_sessions * 3 // 4)

    @property
    def responses_per_minute(self) -> int | None:
        """Responses of one key per minute; None: no limit.

        The default with keys is above the need of conversations and below that of a runaway loop.
        """
        if self.max_responses_per_minute is not None or not self.api_keys:
            return self.max_responses_per_minute
        return _RESPONSES_PER_MINUTE_OF_A_SESSION * (self.sessions_per_key or self.max_sessions)

    def kept_by(self, model: ModelFacts) -> RetentionConfig | None:
        """What sessions of this model keep; None: everything."""
        if self.retention is None:
            return None
        args = self.stages["thinker"].args if "thinker" in self.stages else {}
        limits = [args.get("context_length"), args.get("max_total_tokens")]
        limits.append(model.good_tokens or model.context_tokens)
        known = [limit for limit in limits if type(limit) is int and limit > 0]
        return self.retention.suited_to(min(known, default=None))

    def speculation_ms(self, *, recognises: bool) -> int | None:
        """Silence after which a speculative turn may start; None: there are none.

        recognises: a recogniser hears for the model.
        """
        if self.speculate_ms is not None:
            return self.speculate_ms or None
        if not self.policies.truncate:
            return None
        return _SPECULATE_RECOGNISED_MS if recognises else _SPECULATE_MS

    def _check_counts(self) -> None:
        for name in (
            "max_sessions",
            "max_sessions_per_key",
            "max_sessions_per_secret",
            "max_responses_per_minute",
            "max_connections_per_address",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadInputError(f"{name.replace('_', '-')} must be at least 1, got {value}")

    def _check_times(self) -> None:
        if not (self.turn_prefill_s >= 1 and self.turn_prefill_s.is_integer()):
            raise BadInputError("turn-prefill-s must be whole seconds, at least 1")
        if self.speculate_ms and not self.policies.truncate:
            raise BadInputError(
                "--speculate-ms needs the policy truncate, which removes speculative turns"
            )
        if not 0 < self.first_audio_s < math.inf:
            raise BadInputError("admission-first-audio-ms must be positive")
        if not 0 < self.first_request_s < math.inf:
            raise BadInputError("first-request-s must be positive")
        if not 0 <= self.drain_s < math.inf:
            raise BadInputError("drain-s must be seconds, at least 0")
        if not 0 <= self.idle_session_s < math.inf:
            raise BadInputError("idle-session-s must be seconds, at least 0")

    def _check_access(self) -> None:
        keys = (*self.api_keys, *self.batch_only_keys)
        if not all(key.strip() for key in keys):
            raise BadInputError("an API key is empty")
        # The message goes to the log, so it does not contain the key. HTTP headers lose spaces
        # around a key, subprotocols cannot contain any, and two keys without a comma between them
        # look like one.
        if any(key.split() != [key] for key in keys):
            raise BadInputError("an API key has spaces in it; a comma separates keys")
        if self.batch_only_keys and not self.api_keys:
            raise BadInputError("--batch-only-key needs --api-key: without one any key is accepted")
        if set(self.batch_only_keys) & set(self.api_keys):
            raise BadInputError("a key is both an --api-key and a --batch-only-key")
        if self.host not in LOOPBACK and not self.api_keys and not self.allow_anonymous:
            raise BadInputError(
                f"serving {self.host} without an API key: give --api-key, or --allow-anonymous"
            )
