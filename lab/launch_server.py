"""`python -m lab.launch_server --device-model FILE …`: the server, on a modelled device.

It also serves the folders of lab/random_model as `--model-path`, and with `--stateless` as SGLang
alone would (lab/stateless.py). All other flags are those of sglang_live.launch_server; without
these three it is that server.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from lab.attachment import around, attach_to_own_server
from lab.modelled_device.attach import environment
from lab.random_model import attach as random_model
from lab.random_model.folder import is_random_model
from sglang_live import launch_server
from sglang_live.attachment import ATTACH_ENV
from sglang_live.config import ServerConfig
from sglang_live.environment import start_in_utf8_mode
from sglang_live.errors import BadInputError
from sglang_live.extensions.planner.device_model.model import DeviceModel, load_device_model
from sglang_live.models.family import ModelFacts
from sglang_live.stages.spec import StageConfig

log = logging.getLogger("lab")

STATELESS = {ATTACH_ENV: "lab.stateless:attach"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("lab.launch_server", add_help=False, allow_abbrev=False)
    parser.add_argument("--device-model", type=Path)
    parser.add_argument("--model-path")
    parser.add_argument("--stateless", action="store_true")
    own, rest = parser.parse_known_args(argv)
    if own.model_path is not None:
        rest = ["--model-path", own.model_path, *rest]
        if is_random_model(Path(own.model_path)):
            attach_to_own_server(random_model.ENVIRONMENT)
            rest += random_model.SERVER_ARGS
    if own.stateless:
        attach_to_own_server(STATELESS)
    if own.device_model is None:
        return launch_server.main(rest)
    attach_to_own_server(environment(own.device_model))

    def parse(parse_own: Callable[[list[str]], ServerConfig], argv: list[str]) -> ServerConfig:
        config = parse_own(argv)
        model = load_device_model(own.device_model)
        check_stages(config.stages, model)
        log.warning("device_is_modelled %s", model.facts())
        return config

    around(launch_server, "parse", parse)
    # Those of the flags are the modelled ones.
    around(launch_server, "check_devices", lambda _check, _used: None)
    around(launch_server, "check_flags", _check_flags)
    return launch_server.main(rest)


def check_stages(stages: Mapping[str, StageConfig], model: DeviceModel) -> None:
    """Raises BadInputError for stages that the modelled device cannot carry."""
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


def _check_flags(
    check: Callable[[ServerConfig, ModelFacts], None], config: ServerConfig, model: ModelFacts
) -> None:
    if "talker" not in model.stages:
        raise BadInputError("--device-model has the costs of a talker, and this model has none")
    check(config, model)


if __name__ == "__main__":
    start_in_utf8_mode()
    sys.exit(main())
