"""Every setting of the server, from its arguments and its environment.

launch_stage has a few arguments of its own; what our processes tell each other, and what is for
measuring, is read where it is used.

Arguments of ours are listed below. Any other argument goes to SGLang: `--thinker.NAME value` to
the thinker's engine, `--talker.NAME value` to the talker's, unprefixed to both. `--vocoder.NAME`
sets a field of VocoderConfig. `--STAGE.replicas N` starts N processes of a stage;
`--STAGE.connect tcp://HOST:PORT[,…]` uses stages that launch_stage started on other hosts.
"""

import argparse
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_live.errors import BadInputError
from sglang_live.kv.retention import RetentionConfig
from sglang_live.policy.policies import OFF, Policies
from sglang_live.stages.spec import STAGES, STUCK_AFTER_S
from sglang_live.stages.stage_flags import check_engine, split_arguments
from sglang_live.stages.transport.stage_key import add_key_arguments, check_exposed

POLICIES_HELP = "`off`, `all`, or a comma list"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
LOG_FORMATS = ("text", "json")
_RETENTION = RetentionConfig()
_GIB = 1 << 30
# An answer every two seconds; people take five at the least.
_RESPONSES_PER_MINUTE_OF_A_SESSION = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """connect: addresses of running stages; empty to start `replicas` of our own."""

    replicas: int = 1
    device: str = "cuda:0"
    connect: tuple[str, ...] = ()
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(not address.startswith("tcp://") for address in self.connect):
            raise BadInputError(f"connect takes tcp:// addresses, got {self.connect}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStorage:
    """Room on a disk for the KV of callers who will not speak soon."""

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
    """
    retention: what sessions keep of long conversations; None: everything.
    session_storage: of each thinker; None: their host memory is all there is.
    first_audio_s: what `admission` lets a turn take to its first audio.
    speculate_ms: of silence after which an answer is begun; None: when the turn is over.
    stuck_after_s: an engine with work that completes no round for so long is started anew.
    max_sessions_per_key, max_responses_per_minute: as given; what holds is below.
    max_sessions_per_secret: calls that one client secret may have open.
    idle_session_s: a call whose client sends nothing for so long is closed; 0: never.
    max_connections_per_address: None: what max_sessions needs, at least 1,024.
    first_request_s: how long a connection may take to send the headers of a request.
    drain_s: how long running answers may take to end when the server is to stop.
    turn_prefill_s: speech that `turn-prefill` prefills at once while the user goes on speaking.
    """

    model_path: str
    served_model_name: str
    host: str = "127.0.0.1"
    port: int = 30000
    policies: Policies = OFF
    retention: RetentionConfig | None = None
    session_storage: SessionStorage | None = None
    api_keys: tuple[str, ...] = ()
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
    cache_dir: Path = Path.home() / ".cache" / "sglang_live"
    log_dir: Path | None = None
    log_format: str = "text"
    timeline_dir: Path | None = None
    stage_key_file: str = ""
    stages: dict[str, StageConfig] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65_536:
            raise BadInputError(f"port {self.port} is out of range")
        if self.max_sessions < 1:
            raise BadInputError(f"max-sessions must be at least 1, got {self.max_sessions}")
        if not (self.turn_prefill_s >= 1 and self.turn_prefill_s.is_integer()):
            raise BadInputError("turn-prefill-s must be whole seconds, at least 1")
        if self.speculate_ms is not None and self.speculate_ms < 1:
            raise BadInputError("speculate-ms must be positive")
        if self.speculate_ms is not None and not self.policies.truncate:
            raise BadInputError(
                "--speculate-ms needs the policy truncate: speculative turns are withdrawn"
            )
        if not 0 < self.first_audio_s < math.inf:
            raise BadInputError("admission-first-audio-ms must be positive")
        if not 0 <= self.drain_s < math.inf:
            raise BadInputError("drain-s must be seconds, at least 0")
        if self.max_sessions_per_key is not None and self.max_sessions_per_key < 1:
            raise BadInputError("max-sessions-per-key must be at least 1")
        if self.max_responses_per_minute is not None and self.max_responses_per_minute < 1:
            raise BadInputError("max-responses-per-minute must be at least 1")
        if self.max_connections_per_address is not None and self.max_connections_per_address < 1:
            raise BadInputError("max-connections-per-address must be at least 1")
        if self.max_sessions_per_secret < 1:
            raise BadInputError("max-sessions-per-secret must be at least 1")
        if not 0 <= self.idle_session_s < math.inf:
            raise BadInputError("idle-session-s must be seconds, at least 0")
        if not 0 < self.first_request_s < math.inf:
            raise BadInputError("first-request-s must be positive")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise BadInputError("--ssl-keyfile without --ssl-certfile")
        for file in (self.ssl_certfile, self.ssl_keyfile):
            if file and not file.is_file():
                raise BadInputError(f"there is no file {file}")
        if not all(key.strip() for key in self.api_keys):
            raise BadInputError("an API key is empty")
        # Not the key itself: this goes to the log. Headers lose spaces around it, subprotocols
        # have none, and two keys without a comma between them look like one.
        if any(key.split() != [key] for key in self.api_keys):
            raise BadInputError("an API key has spaces in it; a comma separates keys")
        if self.host not in LOOPBACK and not self.api_keys and not self.allow_anonymous:
            raise BadInputError(
                f"serving {self.host} without an API key: give --api-key, or --allow-anonymous"
            )

    @property
    def sessions_per_key(self) -> int | None:
        """With several keys none takes all seats. None: no limit."""
        if self.max_sessions_per_key is not None or len(self.api_keys) < 2:
            return self.max_sessions_per_key
        return max(1, self.max_sessions * 3 // 4)

    @property
    def answers_per_minute(self) -> int | None:
        """With keys more than calls need, and less than a loop takes. None: no limit."""
        if self.max_responses_per_minute is not None or not self.api_keys:
            return self.max_responses_per_minute
        return _RESPONSES_PER_MINUTE_OF_A_SESSION * (self.sessions_per_key or self.max_sessions)


def parse(argv: list[str]) -> ServerConfig:
    """Raises BadInputError for values that cannot be; argparse exits for unknown syntax."""
    own, rest = _parser().parse_known_args(argv)
    stage_args, shared = split_arguments(rest, vars(own))
    keys = own.api_key or []
    if not keys and (env := os.environ.get("SGLANG_LIVE_API_KEYS")):
        keys = [key.strip() for key in env.split(",") if key.strip()]
    policies, retention = Policies.from_flag(own.live_policies), _retention(own)
    stages = {}
    for stage in STAGES:
        args = dict(stage_args[stage])
        if stage != "vocoder":
            args = {**shared, **args}
        connect = tuple(a for a in args.pop("connect", "").split(",") if a)
        replicas, device = args.pop("replicas", len(connect) or 1), args.pop("device", "cuda:0")
        check_engine(stage, args, policies)
        stages[stage] = StageConfig(replicas=replicas, device=device, connect=connect, args=args)
    remote = tuple(address for stage in stages.values() for address in stage.connect)
    check_exposed(remote, own.stage_key_file, own.allow_keyless_stages)
    storage = parse_storage(own, policies, stages["thinker"].args)
    return ServerConfig(
        model_path=own.model_path,
        served_model_name=own.served_model_name or Path(own.model_path).resolve().name,
        host=own.host,
        port=own.port,
        policies=policies,
        retention=retention if policies.retention else None,
        session_storage=storage,
        api_keys=tuple(keys),
        ssl_certfile=Path(own.ssl_certfile) if own.ssl_certfile else None,
        ssl_keyfile=Path(own.ssl_keyfile) if own.ssl_keyfile else None,
        operator_key=own.operator_key or os.environ.get("SGLANG_LIVE_OPERATOR_KEY") or None,
        allow_anonymous=own.allow_anonymous,
        allow_local_media=own.allow_local_media,
        allow_private_media_urls=own.allow_private_media_urls,
        max_sessions=own.max_sessions,
        first_audio_s=own.admission_first_audio_ms / 1000,
        turn_prefill_s=own.turn_prefill_s,
        stuck_after_s=check_stuck(own.stuck_after_s),
        drain_s=own.drain_s,
        speculate_ms=own.speculate_ms,
        max_sessions_per_key=own.max_sessions_per_key,
        max_responses_per_minute=own.max_responses_per_minute,
        max_sessions_per_secret=own.max_sessions_per_secret,
        idle_session_s=own.idle_session_s,
        max_connections_per_address=own.max_connections_per_address,
        first_request_s=own.first_request_s,
        cache_dir=Path(own.cache_dir),
        log_dir=Path(own.log_dir) if own.log_dir else None,
        log_format=own.log_format,
        timeline_dir=Path(own.timeline_dir) if own.timeline_dir else None,
        stage_key_file=own.stage_key_file,
        stages=stages,
    )


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "sglang_live.launch_server", description=__doc__, allow_abbrev=False
    )
    p.add_argument("--model-path", required=True, help="checkpoint directory, or demo, demo-random")
    p.add_argument("--served-model-name", help="name clients use (default: last part of the path)")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=30000)
    p.add_argument("--live-policies", default="all", help=POLICIES_HELP)
    p.add_argument(
        "--retention-window",
        type=int,
        default=_RETENTION.window_tokens,
        metavar="TOKENS",
        help="what a session keeps of what was said last; 0: everything",
    )
    p.add_argument(
        "--retention-sink",
        type=int,
        metavar="TOKENS",
        help="what it keeps of its beginning (default: the instructions)",
    )
    p.add_argument(
        "--retention-slack",
        type=int,
        default=_RETENTION.slack_tokens,
        metavar="TOKENS",
        help="how far it may grow beyond both before it is cut back",
    )
    add_log_argument(p)
    add_storage_arguments(p)
    add_stuck_argument(p)
    add_key_arguments(p)
    p.add_argument(
        "--drain-s",
        type=float,
        default=20.0,
        metavar="S",
        help="on SIGTERM or SIGINT running answers may end within so long; a second signal ends "
        "the server at once (default: %(default)g)",
    )
    p.add_argument("--api-key", action="append", help="accepted key; may be given several times")
    p.add_argument("--operator-key", help="key for what concerns all callers: /flush_cache")
    p.add_argument("--ssl-certfile", help="serve https and wss with this certificate (PEM)")
    p.add_argument("--ssl-keyfile", help="its private key, if that is another file")
    p.add_argument("--allow-anonymous", action="store_true", help="serve non-loopback without key")
    p.add_argument("--allow-local-media", action="store_true", help="requests may name files")
    p.add_argument(
        "--allow-private-media-urls", action="store_true", help="requests may name private URLs"
    )
    p.add_argument("--max-sessions", type=int, default=64, help="callers at once, at most")
    p.add_argument(
        "--turn-prefill-s",
        type=float,
        default=8.0,
        metavar="S",
        help="speech taken in at once while the caller goes on; shorter gains more and is less "
        "exact, 8 is the encoder's own window (default: %(default)g)",
    )
    p.add_argument(
        "--speculate-ms",
        type=int,
        metavar="MS",
        help="begin to answer after so much silence, and take it back if the caller goes on; with "
        "server_vad (default: when the turn is over)",
    )
    p.add_argument(
        "--admission-first-audio-ms",
        type=float,
        default=1000.0,
        metavar="MS",
        help="fewer callers while more than one turn in ten takes longer to its first audio",
    )
    p.add_argument(
        "--max-sessions-per-key",
        type=int,
        help="of them, by one key (default: with several keys three quarters, else all)",
    )
    p.add_argument(
        "--max-sessions-per-secret",
        type=int,
        default=4,
        help="of them, by one client secret (default: %(default)d)",
    )
    p.add_argument(
        "--max-responses-per-minute",
        type=int,
        help="by one key (default: with keys 30 for each call it may have, else no limit)",
    )
    p.add_argument(
        "--idle-session-s",
        type=float,
        default=1800.0,
        metavar="S",
        help="a call whose client sends nothing, no audio either, for so long is closed; 0: never "
        "(default: %(default)g)",
    )
    p.add_argument(
        "--max-connections-per-address",
        type=int,
        metavar="N",
        help="open at once, of one address (default: twice --max-sessions, at least 1024)",
    )
    p.add_argument(
        "--first-request-s",
        type=float,
        default=10.0,
        metavar="S",
        help="a connection that has sent no complete headers is closed after so long "
        "(default: %(default)g)",
    )
    p.add_argument(
        "--cache-dir", default=default_cache_dir(), help="derived files (env SGLANG_LIVE_CACHE)"
    )
    p.add_argument("--log-dir", help="stage logs go to files here instead of stderr")
    p.add_argument("--timeline-dir", help="a timeline of every session goes to a file here")
    return p


def add_storage_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--session-storage",
        metavar="DIR",
        help="KV that a thinker's host memory has no room for goes to a file here",
    )
    parser.add_argument(
        "--session-storage-gib", type=float, default=16.0, help="how long that file may get"
    )


def add_stuck_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stuck-after-s",
        type=float,
        default=STUCK_AFTER_S,
        metavar="S",
        help="an engine that has work and completes no round of it for so long is started anew "
        "(default: %(default)g)",
    )


def add_log_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default="text",
        help="json: one object a line on stderr and in log files (default: %(default)s)",
    )


def check_stuck(stuck_after_s: float) -> float:
    """Raises BadInputError for what is no time to wait."""
    if not 0 < stuck_after_s < math.inf:
        raise BadInputError("stuck-after-s must be positive")
    return stuck_after_s


def parse_storage(
    own: argparse.Namespace, policies: Policies, thinker_args: dict[str, Any]
) -> SessionStorage | None:
    """Raises BadInputError, also where there is no host memory that could overflow."""
    if own.session_storage is None:
        return None
    if not policies.next_use or not thinker_args.get("enable_hierarchical_cache"):
        raise BadInputError(
            "session-storage holds what host memory has no room for: it needs the policy next-use "
            "and --thinker.enable-hierarchical-cache"
        )
    if not math.isfinite(own.session_storage_gib):
        raise BadInputError("session-storage-gib must be a number of GiB")
    n_bytes = int(own.session_storage_gib * _GIB)
    return SessionStorage(directory=Path(own.session_storage), n_bytes=n_bytes)


def _retention(own: argparse.Namespace) -> RetentionConfig | None:
    """Raises BadInputError, also for what a window of 0 makes meaningless."""
    for name, least in (("window", 0), ("sink", 1), ("slack", 1)):
        value = getattr(own, f"retention_{name}")
        if value is not None and value < least:
            raise BadInputError(f"retention-{name} must be at least {least}, got {value}")
    if own.retention_window == 0:
        return None
    return RetentionConfig(
        sink_tokens=own.retention_sink,
        window_tokens=own.retention_window,
        slack_tokens=own.retention_slack,
    )


def default_cache_dir() -> str:
    return os.environ.get("SGLANG_LIVE_CACHE") or str(Path.home() / ".cache" / "sglang_live")
