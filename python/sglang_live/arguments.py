"""Settings of the server from its arguments (flags.py) and its environment.

Any argument that is not the server's own goes to its stages (stages/stage_flags.py).
"""

import argparse
import math
import os
from pathlib import Path
from typing import Any

from sglang_live.config import ServerConfig, SessionStorage
from sglang_live.devices import DEFAULT_DEVICE, devices_of_replicas
from sglang_live.environment import cache_directory
from sglang_live.errors import BadInputError
from sglang_live.extension import extensions
from sglang_live.flags import server_parser
from sglang_live.gateway.flex.flags import flex_config
from sglang_live.kv.retention import RetentionFlags
from sglang_live.model_source import ModelSource
from sglang_live.policy.policies import Policies
from sglang_live.stages.spec import STAGES, StageConfig
from sglang_live.stages.stage_flags import check_engine, split_arguments
from sglang_live.stages.transport.lease_flags import leases_of
from sglang_live.stages.transport.stage_key import check_exposed, host_and_port

_GIB = 1 << 30


def parse(argv: list[str]) -> ServerConfig:
    """Raises BadInputError for invalid values; argparse exits for unknown syntax."""
    own, rest = server_parser().parse_known_args(argv)
    stage_args, shared = split_arguments(rest, vars(own))
    policies, retention = Policies.from_flag(own.live_policies), _retention(own)
    stages = _stages(stage_args, shared, policies)
    remote = tuple(address for stage in stages.values() for address in stage.connect)
    found = (one.addition(own, policies, stages) for one in extensions())
    check_exposed(remote, own.stage_key_file, own.allow_keyless_stages)
    return ServerConfig(
        model=ModelSource.of(own),
        served_model_name=own.served_model_name or Path(own.model_path).resolve().name,
        host=own.host.removeprefix("[").removesuffix("]"),
        port=own.port,
        speaker_model=own.speaker_model,
        policies=policies,
        retention=retention if policies.retention else None,
        session_storage=parse_storage(own, policies, stages["thinker"].args),
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
        cache_dir=cache_directory(own.cache_dir),
        log_dir=_path(own.log_dir),
        log_format=own.log_format,
        timeline_dir=_path(own.timeline_dir),
        cpu_weights=own.cpu_weights,
        stage_key_file=own.stage_key_file,
        additions=tuple(one for one in found if one is not None),
        stages=stages,
    )


def _stages(
    stage_args: dict[str, dict[str, Any]], shared: dict[str, Any], policies: Policies
) -> dict[str, StageConfig]:
    stages = {}
    for stage in STAGES:
        args = (shared if stage != "vocoder" else {}) | stage_args[stage]
        connect = tuple(a for a in args.pop("connect", "").split(",") if a)
        for address in connect:
            host_and_port(f"--{stage}.connect", address)
        replicas = args.pop("replicas", len(connect) or None)
        named = args.pop("device", None)
        if connect and "device" in stage_args[stage]:
            raise BadInputError(
                f"--{stage}.device: the stages of --{stage}.connect run on the devices that "
                "launch_stage was given"
            )
        listed = named or (DEFAULT_DEVICE,)
        devices = devices_of_replicas(f"--{stage}.device", listed, replicas, args)
        check_engine(stage, args, policies)
        stages[stage] = StageConfig(
            replicas=len(devices),
            devices=devices,
            names_devices=named is not None,
            connect=connect,
            args=args,
            flags=tuple(f"--{stage}.{name.replace('_', '-')}" for name in stage_args[stage]),
        )
    return stages


def _keys(given: list[str] | None, variable: str) -> tuple[str, ...]:
    if given:
        return tuple(given)
    return tuple(key.strip() for key in os.environ.get(variable, "").split(",") if key.strip())


def _path(value: str | None) -> Path | None:
    return Path(value) if value else None


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


def _retention(own: argparse.Namespace) -> RetentionFlags | None:
    """Raises BadInputError, also for values that a window of 0 makes meaningless."""
    for name, least in (("window", 0), ("sink", 1), ("slack", 1)):
        value = getattr(own, f"retention_{name}")
        if value is not None and value < least:
            raise BadInputError(f"retention-{name} must be at least {least}, got {value}")
    if own.retention_window == 0:
        return None
    return RetentionFlags(
        sink_tokens=own.retention_sink,
        window_tokens=own.retention_window,
        slack_tokens=own.retention_slack,
    )
