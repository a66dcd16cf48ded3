"""Specs of all stage replicas that a server starts or connects to."""

import logging
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from sglang_live.config import ServerConfig
from sglang_live.devices import devices_of_ranks, may_have_gpu
from sglang_live.errors import BadInputError
from sglang_live.model_flags import available_bytes
from sglang_live.models.family import CPU_WEIGHTS_ENV, INT8, ModelFacts
from sglang_live.policy.policies import ALL
from sglang_live.stages.spec import ARBITER, StageConfig, StageSpec
from sglang_live.stages.supervisor import loopback_address

log = logging.getLogger(__name__)

MIN_REQUEST_ROWS = 256
# Request rows for out-of-band responses and SGLang's own API, in addition to those of sessions.
SPARE_REQUEST_ROWS = 32
# Host memory that KV is copied to by default: half of what is left beside this, at most as much,
# and none if that is little. SGLang itself leaves 10 GiB free; more takes long to pin.
_HOST_SPARE_GIB, _HOST_TIER_MOST_GB, _HOST_TIER_LEAST_GB = 16, 64, 4


def stage_specs(
    config: ServerConfig, model: ModelFacts, run_dir: Path, native_key: str
) -> list[StageSpec]:
    """One spec per replica, and what extensions add.

    Only the first local thinker serves SGLang's own API.
    """
    used = {stage: _devices(config.stages[stage]) for stage in model.stages}
    specs = []
    for stage in model.stages:
        settings = config.stages[stage]
        local = [loopback_address(run_dir, stage, i) for i in range(settings.replicas)]
        for replica, address in enumerate(settings.connect or local):
            remote = bool(settings.connect)
            others = set().union(*(used[other] for other in model.stages if other != stage))
            ranks = devices_of_ranks(settings.devices[replica], settings.args)
            serves_native = (stage, replica) == ("thinker", 0) and not remote
            specs.append(
                StageSpec(
                    stage=stage,
                    replica=replica,
                    model_path=str(model.path),
                    family=model.family,
                    cache_dir=str(config.folders.cache_dir),
                    address=address,
                    same_host=not remote,
                    remote=remote,
                    key_file=config.stage_options.stage_key_file if remote else "",
                    run_dir=str(run_dir),
                    served_name=config.served_model_name,
                    device=settings.devices[replica],
                    shares_device=not remote and not others.isdisjoint(ranks),
                    native_key=native_key if serves_native else "",
                    engine_args={
                        **_engine_args(stage, settings.args, _at_once(config)),
                        **(host_tier(config, model) if stage == "thinker" and not remote else {}),
                    },
                    policies=config.policies,
                    session_storage=config.session_storage.to_env() if stage == "thinker" else "",
                    voices=recordings_of(stage, model),
                    log_format=config.folders.log_format,
                    stuck_after_s=config.stage_options.stuck_after_s,
                    environment=weights_environment(stage, config.stage_options.cpu_weights, model),
                )
            )
    if config.policies.arbiter and not (config.policies == ALL and _works_alone(specs)):
        if "talker" not in model.stages:
            raise BadInputError("policy arbiter: there is no talker whose turns it could order")
        specs = with_arbiters(specs)
    for addition in config.additions:
        specs = addition.stages(specs)
    return specs


def host_tier(config: ServerConfig, model: ModelFacts) -> dict[str, Any]:
    """Arguments of the thinkers by which the KV of idle sessions goes to the host.

    Empty where flags decide, the host has little memory, or all sessions fit into the pool.
    """
    thinker = config.stages["thinker"]
    args = thinker.args
    on_gpu = thinker.devices[0] != "cpu" and may_have_gpu()
    decided = any(name in args for name in ("enable_hierarchical_cache", "disable_radix_cache"))
    if decided or not (on_gpu and config.policies.next_use):
        return {}
    if "hicache_size" in args:
        return {"enable_hierarchical_cache": True}
    kept, pool = config.kept_by(model), args.get("max_total_tokens")
    if kept is not None and pool is not None:
        each = kept.window_tokens + kept.slack_tokens
        if config.capacity.max_sessions * each <= pool:
            return {}
    n_shards = sum(len(devices_of_ranks(device, args)) for device in thinker.devices)
    spare_gb = (available_bytes() - _HOST_SPARE_GIB * 2**30) / 1e9
    size_gb = int(min(spare_gb / 2 / n_shards, _HOST_TIER_MOST_GB))
    if size_gb < _HOST_TIER_LEAST_GB:
        log.info("host_tier_off free_gb=%.0f", available_bytes() / 1e9)
        return {}
    log.info("host_tier gb=%d shards=%d", size_gb, n_shards)
    return {"enable_hierarchical_cache": True, "hicache_size": size_gb}


def _works_alone(specs: list[StageSpec]) -> bool:
    """Whether `all` has no turns: no stages share a GPU, or each of them has several."""
    shared = [spec for spec in specs if spec.shares_device and spec.device != "cpu"]
    n_ranks = [len(devices_of_ranks(spec.device, spec.engine_args)) for spec in shared]
    share = "talker" in {spec.stage for spec in shared} and max(n_ranks) == 1
    return not (share and may_have_gpu())


def with_arbiters(specs: list[StageSpec]) -> list[StageSpec]:
    """These stages with turns on the devices that they share, and an arbiter for each device.

    Raises:
        BadInputError: a stage that shares a device uses several.
    """
    found: list[StageSpec] = []
    arbiters: dict[str, StageSpec] = {}
    for spec in specs:
        if not spec.shares_device:
            found.append(spec)
            continue
        if len(devices_of_ranks(spec.device, spec.engine_args)) > 1:
            raise BadInputError(
                f"policy arbiter: {spec.name} shares a device and uses several; give it its own"
            )
        if spec.device not in arbiters:
            arbiters[spec.device] = _arbiter(spec, len(arbiters))
        turns = arbiters[spec.device].turns
        # With a batch in the queue behind the present one, the device would not be free between.
        args = {} if spec.stage == "vocoder" else {"disable_overlap_schedule": True}
        found.append(replace(spec, turns=turns, engine_args={**spec.engine_args, **args}))
    return [*arbiters.values(), *found]


def _arbiter(spec: StageSpec, number: int) -> StageSpec:
    """Of the device of this stage."""
    run_dir = Path(spec.run_dir)
    return replace(
        spec,
        stage=ARBITER,
        replica=number,
        address=loopback_address(run_dir, ARBITER, number),
        factory="sglang_live.stages.device_arbiter:DeviceArbiter",
        turns=str(run_dir / f"{ARBITER}-{number}-turns"),
        engine_args={},
        environment={},
        native_key="",
        session_storage="",
        voices="",
    )


def _devices(settings: StageConfig) -> set[str]:
    """Devices of a stage's replicas on this host."""
    if settings.connect:
        return set()
    return set().union(*(devices_of_ranks(one, settings.args) for one in settings.devices))


def weights_environment(stage: str, cpu_weights: str, model: ModelFacts) -> dict[str, str]:
    """cpu_weights: see StageOptions."""
    weights = cpu_weights or model.cpu_weights
    return {CPU_WEIGHTS_ENV: weights} if stage == "thinker" and weights == INT8 else {}


def recordings_of(stage: str, model: ModelFacts) -> str:
    """See StageSpec.voices."""
    return str(model.recordings) if model.recordings and stage in model.recording_stages else ""


def _at_once(config: ServerConfig) -> int:
    """Sessions, and requests that take none."""
    added = sum(addition.requests_at_once for addition in config.additions)
    return config.capacity.max_sessions + config.flex.at_once + added


def _engine_args(stage: str, args: dict[str, Any], at_once: int) -> dict[str, Any]:
    if stage == "vocoder":
        return {"max_streams": at_once + SPARE_REQUEST_ROWS, **args}
    return {
        # A session keeps its request row in the thinker between turns.
        "max_running_requests": max(MIN_REQUEST_ROWS, at_once + SPARE_REQUEST_ROWS),
        **args,
    }
