"""Settings of the server from its arguments and its environment.

The server's own arguments are listed below. Any other argument goes to SGLang: `--thinker.NAME
value` to the thinker's engine, `--talker.NAME value` to the talker's, without a prefix to both.
`--vocoder.NAME` sets a field of VocoderConfig. `--STAGE.replicas N` starts N processes of a stage;
`--STAGE.device cuda:4[,cuda:5]` names the devices of its replicas.
`--STAGE.connect tcp://HOST:PORT[,…]` uses stages that launch_stage started on other hosts.
"""

import argparse
import math
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from sglang_live.config import (
    LOG_FORMATS,
    SPEAKER_MODELS,
    ServerConfig,
    SessionStorage,
    StageConfig,
    default_cache_dir,
)
from sglang_live.device_model.model import load_device_model
from sglang_live.devices import DEFAULT_DEVICE, devices_of_replicas
from sglang_live.errors import BadInputError
from sglang_live.gateway.batch.flags import add_batch_arguments, batch_config
from sglang_live.gateway.flex.flags import add_flex_arguments, flex_config
from sglang_live.kv.retention import RetentionConfig
from sglang_live.model_source import ModelSource, add_model_arguments
from sglang_live.models.family import INT8, OWN
from sglang_live.policy.policies import Policies
from sglang_live.stages.spec import STAGES, STUCK_AFTER_S
from sglang_live.stages.stage_flags import check_engine, split_arguments
from sglang_live.stages.transport.lease_flags import add_lease_arguments, leases_of
from sglang_live.stages.transport.stage_key import add_key_arguments, check_exposed

POLICIES_HELP = "`off`, `all`, or a comma-separated list"
_DEFAULTS = {field.name: field.default for field in fields(ServerConfig)}
_RETENTION = RetentionConfig()
_GIB = 1 << 30


def parse(argv: list[str]) -> ServerConfig:
    """Raises BadInputError for invalid values; argparse exits for unknown syntax."""
    own, rest = _parser().parse_known_args(argv)
    stage_args, shared = split_arguments(rest, vars(own))
    policies, retention = Policies.from_flag(own.live_policies), _retention(own)
    stages = _stages(stage_args, shared, policies)
    remote = tuple(address for stage in stages.values() for address in stage.connect)
    check_exposed(remote, own.stage_key_file, own.allow_keyless_stages)
    return ServerConfig(
        model=ModelSource.of(own),
        served_model_name=own.served_model_name or Path(own.model_path).resolve().name,
        host=own.host,
        port=own.port,
        speaker_model=own.speaker_model,
        policies=policies,
        retention=retention if policies.retention else None,
        session_storage=parse_storage(own, policies, stages["thinker"].args),
        elastic_kv=own.elastic_kv,
        api_keys=_keys(own.api_key, "SGLANG_LIVE_API_KEYS"),
        batch_only_keys=_keys(own.batch_only_key, "SGLANG_LIVE_BATCH_ONLY_KEYS"),
        flex=flex_config(own),
        leases=leases_of(own, policies, stages),
        ssl_certfile=_path(own.ssl_certfile),
        ssl_keyfile=_path(own.ssl_keyfile),
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
        log_dir=_path(own.log_dir),
        log_format=own.log_format,
        timeline_dir=_path(own.timeline_dir),
        batch_dir=_path(own.batch_dir),
        batch=batch_config(own),
        device_model=_device_model(own.device_model, stages),
        cpu_weights=own.cpu_weights,
        stage_key_file=own.stage_key_file,
        stages=stages,
    )


def _stages(
    stage_args: dict[str, dict[str, Any]], shared: dict[str, Any], policies: Policies
) -> dict[str, StageConfig]:
    stages = {}
    for stage in STAGES:
        args = (shared if stage != "vocoder" else {}) | stage_args[stage]
        connect = tuple(a for a in args.pop("connect", "").split(",") if a)
        replicas = args.pop("replicas", len(connect) or None)
        listed = args.pop("device", (DEFAULT_DEVICE,))
        if connect and "device" in stage_args[stage]:
            raise BadInputError(
                f"--{stage}.device: the stages of --{stage}.connect run on the devices that "
                "launch_stage was given"
            )
        devices = devices_of_replicas(f"--{stage}.device", listed, replicas, args)
        check_engine(stage, args, policies)
        stages[stage] = StageConfig(
            replicas=len(devices),
            devices=devices,
            connect=connect,
            args=args,
            flags=tuple(f"--{stage}.{name.replace('_', '-')}" for name in stage_args[stage]),
        )
    return stages


def _device_model(path: str | None, stages: dict[str, StageConfig]) -> Path | None:
    """Raises BadInputError for a file that is no device model, and for stages it cannot carry."""
    if path is None:
        return None
    file = Path(path).resolve()
    model = load_device_model(file)
    for name, stage in stages.items():
        if stage.connect:
            raise BadInputError(
                f"--device-model: --{name}.connect uses a device of another host, which is not "
                "modelled"
            )
        if stage.args.get("tp_size", 1) != 1:
            raise BadInputError(
                f"--device-model: its costs are those of one device, not of --{name}.tp-size "
                f"{stage.args['tp_size']}"
            )
        for device in stage.devices:
            try:
                model.check_device(device)
            except ValueError as error:
                raise BadInputError(f"--{name}.device: {error}") from None
    return file


def _keys(given: list[str] | None, variable: str) -> tuple[str, ...]:
    if given:
        return tuple(given)
    return tuple(key.strip() for key in os.environ.get(variable, "").split(",") if key.strip())


def _path(value: str | None) -> Path | None:
    return Path(value) if value else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "sglang_live.launch_server", description=__doc__, allow_abbrev=False
    )
    _add_model_arguments(parser)
    _add_policy_arguments(parser)
    add_log_argument(parser)
    add_storage_arguments(parser)
    add_lease_arguments(parser)
    add_stuck_argument(parser)
    add_key_arguments(parser)
    _add_access_arguments(parser)
    add_flex_arguments(parser)
    _add_limit_arguments(parser)
    _add_folder_arguments(parser)
    add_batch_arguments(parser)
    return parser


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_arguments(parser)
    add(
        "--speaker-model",
        choices=SPEAKER_MODELS,
        help="tell the user's voice from others over a response (docs/turn_taking.md)",
    )
    add("--served-model-name", help="name for clients (default: last part of the path)")
    add("--host", default=_DEFAULTS["host"])
    add("--port", type=int, default=_DEFAULTS["port"])
    add(
        "--device-model",
        metavar="FILE",
        help="without a GPU: have the stages take the time of the device in this file, as "
        "python/sglang_live/device_model/h100_qwen3_omni.toml",
    )
    add_weights_argument(parser)


def _add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--live-policies", default="all", help=POLICIES_HELP)
    add(
        "--retention-window",
        type=int,
        default=_RETENTION.window_tokens,
        metavar="TOKENS",
        help="latest part of a conversation that a session keeps; 0: everything",
    )
    add(
        "--retention-sink",
        type=int,
        metavar="TOKENS",
        help="first part of it that a session keeps (default: the instructions)",
    )
    add(
        "--retention-slack",
        type=int,
        default=_RETENTION.slack_tokens,
        metavar="TOKENS",
        help="growth beyond both before the session is compacted",
    )
    add("--elastic-kv", action="store_true", help="KV pools exchange memory")
    add(
        "--turn-prefill-s",
        type=float,
        default=_DEFAULTS["turn_prefill_s"],
        metavar="S",
        help="length of the pieces in which speech is prefilled while the user goes on speaking; "
        "shorter ones gain more and are less exact, 8 is the encoder's own window "
        "(default: %(default)g)",
    )
    add(
        "--speculate-ms",
        type=_speculate_ms,
        metavar="MS|auto|off",
        help="start a speculative turn after this much silence if the server has room, and "
        "truncate it if the user goes on (default: auto, 200 with the policy truncate)",
    )
    add(
        "--admission-first-audio-ms",
        type=float,
        default=1000.0,
        metavar="MS",
        help="admit fewer sessions while more than one turn in ten takes longer to its first audio",
    )


def _speculate_ms(text: str) -> int | None:
    if text in ("auto", "off"):
        return None if text == "auto" else 0
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: positive milliseconds, auto or off")
    return int(text)


def _add_access_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--api-key", action="append", help="accepted key; may be given several times")
    add("--operator-key", help="key for operations that affect all sessions: /flush_cache")
    add("--ssl-certfile", help="serve https and wss with this certificate (PEM)")
    add("--ssl-keyfile", help="its private key, if that is another file")
    add("--allow-anonymous", action="store_true", help="serve non-loopback without a key")
    add("--allow-local-media", action="store_true", help="requests may name files")
    add("--allow-private-media-urls", action="store_true", help="requests may name private URLs")


def _add_limit_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--max-sessions", type=int, default=_DEFAULTS["max_sessions"], help="sessions at once")
    add(
        "--max-sessions-per-key",
        type=int,
        help="sessions of one key at once (default: with several keys three quarters, else all)",
    )
    add(
        "--max-sessions-per-secret",
        type=int,
        default=_DEFAULTS["max_sessions_per_secret"],
        help="sessions of one client secret at once (default: %(default)d)",
    )
    add(
        "--max-responses-per-minute",
        type=int,
        help="responses of one key (default: with keys 30 per session of the key, else no limit)",
    )
    add(
        "--idle-session-s",
        type=float,
        default=_DEFAULTS["idle_session_s"],
        metavar="S",
        help="close a session whose client sends nothing, not even audio, for this time; 0: never "
        "(default: %(default)g)",
    )
    add(
        "--max-connections-per-address",
        type=int,
        metavar="N",
        help="open connections of one address (default: twice --max-sessions, at least 1024)",
    )
    add(
        "--first-request-s",
        type=float,
        default=_DEFAULTS["first_request_s"],
        metavar="S",
        help="close a connection without complete headers after this time (default: %(default)g)",
    )
    add(
        "--drain-s",
        type=float,
        default=_DEFAULTS["drain_s"],
        metavar="S",
        help="time for running responses to end after SIGTERM or SIGINT; a second signal ends the "
        "server at once (default: %(default)g)",
    )


def _add_folder_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cache-dir", default=default_cache_dir(), help="derived files (env SGLANG_LIVE_CACHE)")
    add("--log-dir", help="write stage logs to files in this folder instead of stderr")
    add("--timeline-dir", help="write a timeline of every session to a file in this folder")


def add_storage_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--session-storage",
        metavar="DIR",
        help="write KV that does not fit into a thinker's host memory to a file in this folder",
    )
    parser.add_argument(
        "--session-storage-gib", type=float, default=16.0, help="largest size of that file"
    )


def add_weights_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cpu-weights",
        choices=(OWN, INT8),
        default="",
        help="on a CPU, the thinker's weights: as in the checkpoint, or in 8 bits, several times "
        f"as fast (default: {INT8} for cascade, {OWN} for others)",
    )


def add_stuck_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stuck-after-s",
        type=float,
        default=STUCK_AFTER_S,
        metavar="S",
        help="restart an engine that has work and completes no round of it for this time "
        "(default: %(default)g)",
    )


def add_log_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default=_DEFAULTS["log_format"],
        help="json: one object a line on stderr and in log files (default: %(default)s)",
    )


def check_stuck(stuck_after_s: float) -> float:
    """Raises BadInputError unless the time is positive and finite."""
    if not 0 < stuck_after_s < math.inf:
        raise BadInputError("stuck-after-s must be positive")
    return stuck_after_s


def parse_storage(
    own: argparse.Namespace, policies: Policies, thinker_args: dict[str, Any]
) -> SessionStorage | None:
    """Raises BadInputError, also if there is no host memory that could overflow."""
    if own.session_storage is None:
        return None
    if not policies.next_use or not thinker_args.get("enable_hierarchical_cache"):
        raise BadInputError(
            "session-storage holds KV that does not fit into host memory: it needs the policy "
            "next-use and --thinker.enable-hierarchical-cache"
        )
    if not math.isfinite(own.session_storage_gib):
        raise BadInputError("session-storage-gib must be a number of GiB")
    n_bytes = int(own.session_storage_gib * _GIB)
    return SessionStorage(directory=Path(own.session_storage), n_bytes=n_bytes)


def _retention(own: argparse.Namespace) -> RetentionConfig | None:
    """Raises BadInputError, also for values that a window of 0 makes meaningless."""
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
