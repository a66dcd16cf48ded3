"""What an extension may add to a server, and which extensions there are.

An extension is a folder of extensions/. Its extension.py is imported whenever a server starts, so
it has little more than flags, as an object EXTENSION; everything else of the folder is imported
when its flags are given. No other module of the core knows an extension, and a folder that is
removed leaves a server without its flags.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_live.devices import UsedDevices
from sglang_live.policy.policies import Policies
from sglang_live.settings import Settings

if TYPE_CHECKING:  # their imports take longer than flags do
    from prometheus_client.registry import Collector

    from sglang_live.gateway.parts import GatewayAddition, GatewayParts
    from sglang_live.models.family import ModelFacts
    from sglang_live.stages.spec import StageConfig, StageSpec

FOLDER = Path(__file__).parent / "extensions"


class Addition:
    """What an extension adds to one server. By default nothing.

    Attributes:
        requests_at_once: that take no session, and need room in the stages.
    """

    requests_at_once: int = 0

    def check(self, model: ModelFacts) -> None:
        """Raises BadInputError: the model does not have what the flags are about."""

    def devices(self) -> Iterable[UsedDevices]:
        """Those of processes that it adds."""
        return ()

    def stages(self, specs: Sequence[StageSpec]) -> list[StageSpec]:
        """The specs with what it adds to them: to `environment`, to the scheduler's `parts`, or
        further ones, of processes of its own."""
        return list(specs)

    def start(self, run_dir: Path) -> None:
        """Take what the server needs of this machine, in the event loop, before stages start.

        run_dir: the server's folder for sockets.
        Raises:
            BadInputError: it cannot be had.
        """

    async def stop(self) -> None:
        """After the stages have ended. Also called if start() was not, or failed."""

    def collectors(self) -> Iterable[Collector]:
        """Of metrics. Called after start()."""
        return ()

    def gateway(self, parts: GatewayParts) -> GatewayAddition | None:
        """Routes, and what runs in the gateway. Called after start()."""
        return None


class Extension:
    """
    Attributes:
        title: of its flags in --help.
        flags: settings with flags, whose defaults mean: this extension is off.
    """

    title: str = ""
    flags: type = Settings

    def addition(
        self, own: argparse.Namespace, policies: Policies, stages: Mapping[str, StageConfig]
    ) -> Addition | None:
        """What the flags ask for; None: nothing.

        Args:
            own: values of all flags of the server. read_flags makes `self.flags` of them.
        Raises:
            BadInputError: for values that are wrong, or do not fit the other flags.
        """
        return None


@cache
def extensions() -> tuple[Extension, ...]:
    """All that are installed, by name of their folder."""
    names = sorted(path.parent.name for path in FOLDER.glob("*/extension.py"))
    modules = [importlib.import_module(f"{__package__}.extensions.{n}.extension") for n in names]
    return tuple(module.EXTENSION for module in modules)
