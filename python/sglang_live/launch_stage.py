"""Starts one stage for a server on another host.

  launch_stage --stage talker --model-path DIR \\
      --bind tcp://0.0.0.0:7101 --stage-key-file stage.key

The server then starts with --talker.connect tcp://THIS_HOST:7101 and the same
key file, which authenticates both ends and encrypts the connection. Further
flags go to the stage's engine, as with launch_server, but without a prefix.
"""

import argparse
import ipaddress
import os
import sys
from pathlib import Path
from typing import Any

from sglang_live.arguments import check_stuck, parse_storage
from sglang_live.devices import (
    DEFAULT_DEVICE,
    UsedDevices,
    check_devices,
    devices_of_ranks,
    read_devices,
)
from sglang_live.environment import (
    add_cache_argument,
    cache_directory,
    provide_home,
    start_in_utf8_mode,
)
from sglang_live.errors import BadInputError
from sglang_live.flags import (
    POLICIES_HELP,
    HelpFormatter,
    add_log_argument,
    add_storage_arguments,
    add_stuck_argument,
    add_weights_argument,
)
from sglang_live.gateway.listen_socket import ListenSocket
from sglang_live.launch_server import check_machine, end_in_one_line
from sglang_live.model_source import ModelSource, add_model_arguments
from sglang_live.models.family import family_at
from sglang_live.policy.policies import Policies
from sglang_live.preflight import check_recordings
from sglang_live.stage_specs import talker_voices, weights_environment
from sglang_live.stages.run_dir import RunDir
from sglang_live.stages.spec import SPEC_ENV, STAGES, StageSpec
from sglang_live.stages.stage_flags import STAGE_SETTINGS, check_engine, split_arguments
from sglang_live.stages.transport.stage_key import (
    add_key_arguments,
    check_exposed,
    host_and_port,
)


def main(argv: list[str] | None = None) -> int:
    return end_in_one_line(lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    parser = _parser()
    own, rest = parser.parse_known_args(argv)
    spec = _spec(own, *split_arguments(rest, vars(own), unprefixed=_unprefixed(own.stage)))
    provide_home(Path(spec.cache_dir))
    # The stage's runtime replaces this process, so that signals and exit codes are its own.
    environment = {**os.environ, **spec.environment, SPEC_ENV: spec.to_env()}
    command = [sys.executable, "-m", "sglang_live.stages.runtime"]
    os.execve(sys.executable, command, environment)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "sglang_live.launch_stage",
        usage="%(prog)s --stage NAME --model-path PATH --bind URL ...",
        description=__doc__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--stage", required=True, choices=STAGES, help="which")
    add_model_arguments(parser)
    parser.add_argument(
        "--bind",
        required=True,
        metavar="URL",
        help="tcp://HOST:PORT to listen on; an IPv6 address has brackets",
    )
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="as for the server (default: as there)"
    )
    add_cache_argument(parser)
    parser.add_argument(
        "--device", metavar="NAME", help=f"of this replica (default: {DEFAULT_DEVICE})"
    )
    parser.add_argument(
        "--live-policies",
        default="all",
        metavar="NAMES",
        help=f"{POLICIES_HELP}; the same as the server's (default: %(default)s)",
    )
    add_log_argument(parser)
    add_storage_arguments(parser)
    add_stuck_argument(parser)
    add_weights_argument(parser)
    add_key_arguments(parser)
    return parser


def _unprefixed(stage: str) -> str:
    return "vocoder" if stage == "vocoder" else ""


def _spec(
    own: argparse.Namespace, prefixed: dict[str, dict[str, Any]], engine_args: dict[str, Any]
) -> StageSpec:
    """Raises LiveError for faults that would end the start minutes later."""
    if any(prefixed.values()):
        raise BadInputError("one stage needs no prefix: write --NAME, not --STAGE.NAME")
    if of_server := [name for name in STAGE_SETTINGS if name in engine_args]:
        raise BadInputError(f"--{of_server[0]} is the server's, not that of one stage")
    policies = Policies.from_flag(own.live_policies)
    check_engine(own.stage, engine_args, policies)
    if own.session_storage is not None and own.stage != "thinker":
        raise BadInputError("session-storage is for the thinker only")
    storage = parse_storage(own, policies, engine_args)
    check_machine(storage)
    device = _device(own.device, engine_args)
    _check_free(own.bind)
    check_exposed((own.bind,), own.stage_key_file, own.allow_keyless_stages)
    cache_dir = cache_directory(own.cache_dir)
    model = ModelSource.of(own).load(cache_dir)
    if own.stage not in model.stages:
        raise BadInputError(f"--stage {own.stage}: this model has no {own.stage}")
    if model.recordings is not None and own.stage == "talker":
        check_recordings(model.recordings)
    n_ranks = engine_args.get("tp_size", 1)
    family_at(model.family).check_ranks(model.path, own.stage, "--tp-size", n_ranks)
    return StageSpec(
        stage=own.stage,
        replica=0,
        model_path=str(model.path),
        family=model.family,
        cache_dir=str(cache_dir),
        address=own.bind,
        same_host=False,
        key_file=own.stage_key_file,
        run_dir=str(RunDir.make(survives_exec=True).path),
        served_name=own.served_model_name or Path(own.model_path).name,
        device=device,
        engine_args=engine_args,
        policies=policies,
        log_format=own.log_format,
        voices=talker_voices(own.stage, model),
        session_storage=storage.to_env() if storage is not None else "",
        stuck_after_s=check_stuck(own.stuck_after_s),
        environment=weights_environment(own.stage, own.cpu_weights, model),
    )


def _check_free(address: str) -> None:
    """Raises BadInputError if another process listens there: the stage would load for nothing."""
    host, port = host_and_port("--bind", address)
    host = "0.0.0.0" if host == "*" else host
    try:
        ipaddress.ip_address(host)
    except ValueError:  # the name of a host or of a network interface
        return
    ListenSocket(host, port).close()


def _device(typed: str | None, engine_args: dict[str, Any]) -> str:
    devices = read_devices("--device", typed or DEFAULT_DEVICE)
    if len(devices) > 1:
        raise BadInputError("--device takes one device, that of this replica")
    ranks = devices_of_ranks(devices[0], engine_args)
    check_devices([UsedDevices("--device", ranks, typed is not None)])
    return devices[0]


if __name__ == "__main__":
    start_in_utf8_mode()
    sys.exit(main())
