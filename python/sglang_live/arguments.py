"""Settings of the server from its arguments (flags.py) and its environment.

Any argument that is not the server's own goes to its stages (stages/stage_flags.py).
"""

from typing import Any

from sglang_live.config import ServerConfig
from sglang_live.devices import DEFAULT_DEVICE, devices_of_replicas
from sglang_live.errors import BadInputError
from sglang_live.extension import extensions
from sglang_live.flags import server_parser
from sglang_live.model_source import ModelSource
from sglang_live.policy.policies import Policies
from sglang_live.settings import read_flags
from sglang_live.stages.spec import STAGES, StageConfig
from sglang_live.stages.stage_flags import check_engine, split_arguments
from sglang_live.stages.transport.stage_key import check_exposed, host_and_port


def parse(argv: list[str]) -> ServerConfig:
    """Raises BadInputError for invalid values; argparse exits for unknown syntax."""
    own, rest = server_parser().parse_known_args(argv)
    stage_args, shared = split_arguments(rest, vars(own))
    policies = own.live_policies
    stages = _stages(stage_args, shared, policies)
    remote = tuple(address for stage in stages.values() for address in stage.connect)
    check_exposed(remote, own.stage_key_file, own.allow_keyless_stages)
    found = (one.addition(own, policies, stages) for one in extensions())
    model = read_flags(own, ModelSource)
    return read_flags(
        own,
        ServerConfig,
        model=model,
        served_model_name=own.served_model_name or model.usual_name,
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
