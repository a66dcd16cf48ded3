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
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal

from sglang_live.config import ServerConfig, SessionStorage
from sglang_live.devices import (
    DEFAULT_DEVICE,
    UsedDevices,
    check_devices,
    devices_of_ranks,
    read_devices,
)
from sglang_live.environment import FolderConfig, provide_home, start_in_utf8_mode
from sglang_live.errors import BadInputError
from sglang_live.flags import HelpFormatter
from sglang_live.gateway.listen_socket import ListenSocket
from sglang_live.launch_server import check_machine, end_in_one_line
from sglang_live.model_source import ModelSource
from sglang_live.models.family import family_at
from sglang_live.preflight import check_recordings
from sglang_live.settings import Settings, add_flags, flag, read_flags
from sglang_live.stage_specs import recordings_of, weights_environment
from sglang_live.stages.run_dir import RunDir
from sglang_live.stages.spec import SPEC_ENV, StageOptions, StageSpec
from sglang_live.stages.stage_flags import STAGE_SETTINGS, check_engine, split_arguments
from sglang_live.stages.transport.stage_key import check_exposed, host_and_port


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFlags(Settings):
    """Those that the server does not have."""

    stage: Literal["thinker", "talker", "vocoder"] = flag(MISSING, "which")
    bind: str = flag(
        MISSING, "tcp://HOST:PORT to listen on; an IPv6 address has brackets", value="URL"
    )
    device: str | None = flag(None, "of this replica", value="NAME", unset=DEFAULT_DEVICE)


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
    add_flags(parser, OwnFlags)
    add_flags(parser, ModelSource)
    add_flags(parser, ServerConfig, "served_model_name", "policies")
    add_flags(parser, FolderConfig, "cache_dir", "log_format")
    add_flags(parser, SessionStorage)
    add_flags(parser, StageOptions)
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
    policies, options = own.live_policies, read_flags(own, StageOptions)
    check_engine(own.stage, engine_args, policies)
    storage = read_flags(own, SessionStorage)
    if storage.directory is not None and own.stage != "thinker":
        raise BadInputError("session-storage is for the thinker only")
    storage.check_thinker(policies, engine_args)
    check_machine(storage)
    device = _device(own.device, engine_args)
    _check_free(own.bind)
    check_exposed((own.bind,), options.stage_key_file, options.allow_keyless_stages)
    source, cache_dir = read_flags(own, ModelSource), read_flags(own, FolderConfig).cache_dir
    model = source.load(cache_dir)
    if own.stage not in model.stages:
        raise BadInputError(f"--stage {own.stage}: this model has no {own.stage}")
    if recordings_of(own.stage, model):
        check_recordings(model)
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
        alone=True,
        key_file=options.stage_key_file,
        run_dir=str(RunDir.make(survives_exec=True).path),
        served_name=own.served_model_name or source.usual_name,
        device=device,
        engine_args=engine_args,
        policies=policies,
        log_format=own.log_format,
        voices=recordings_of(own.stage, model),
        session_storage=storage.to_env(),
        stuck_after_s=options.stuck_after_s,
        environment=weights_environment(own.stage, options.cpu_weights, model),
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
