"""What runs in a host's process, without Ray:

    python -m sglang_live.cluster.hosted stages|gateway

In: an order on stdin. Out: HostNews on stdout whenever they change; of a gateway, what
launch_server prints. Stages that share devices have one supervisor here, which starts them again
when they end, at the same addresses.
"""

import asyncio
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import uvloop

from sglang_live import launch_server
from sglang_live.aio import close_all, vital
from sglang_live.cluster.child import read_order, report
from sglang_live.cluster.spec import parsed
from sglang_live.config import ServerConfig
from sglang_live.environment import provide_home, start_in_utf8_mode
from sglang_live.models.family import ModelFacts
from sglang_live.stage_specs import stage_specs
from sglang_live.stages.ports import free_port
from sglang_live.stages.run_dir import RunDir
from sglang_live.stages.spec import STAGES, StageSpec
from sglang_live.stages.supervisor import STAGE_COMMAND, Replica, Supervisor
from sglang_live.stages.transport.protocol import protocol_hash
from sglang_live.stages.transport.stage_key import check_exposed
from sglang_live.stages.zygote import Zygote, is_useful
from sglang_live.telemetry.log_lines import log_in_lines
from sglang_live.telemetry.log_writing import LogDrops, protect_own_output

_REPORT_EVERY_S = 0.25


class StagesOrder(msgspec.Struct, frozen=True, kw_only=True):
    """
    argv: as for launch_server.
    address: of this machine, for the others.
    command: see HostGroup.
    """

    argv: list[str]
    stages: list[str]
    address: str
    command: list[str]


class GatewayOrder(msgspec.Struct, frozen=True, kw_only=True):
    """argv: of launch_server."""

    argv: list[str]


class ReplicaNews(msgspec.Struct, frozen=True, kw_only=True):
    """
    number: among those of this host.
    n_sessions, n_jobs: that it has, and that run in it.
    """

    stage: str
    number: int
    address: str
    is_up: bool
    n_sessions: int = 0
    n_jobs: int


class HostNews(msgspec.Struct, frozen=True, kw_only=True):
    """
    protocol: see TableRow in orchestrator/directory.py.
    url: of a gateway, once it serves.
    replicas: of a host of stages.
    error: why it does not serve. "": not known.
    ended: whether it has ended by itself, after it was to drain.
    """

    protocol: str = ""
    url: str = ""
    replicas: tuple[ReplicaNews, ...] = ()
    error: str = ""
    ended: bool = False

    @property
    def is_up(self) -> bool:
        return bool(self.url) or (
            bool(self.replicas) and all(replica.is_up for replica in self.replicas)
        )


def main() -> int:
    if sys.argv[1:] == ["gateway"]:
        return launch_server.main(read_order(GatewayOrder).argv)
    os.umask(0o077)  # see launch_server
    drops = LogDrops()
    protect_own_output(drops)
    order = read_order(StagesOrder)
    return launch_server.end_in_one_line(lambda: _serve_stages(order, drops))


def _serve_stages(order: StagesOrder, drops: LogDrops) -> int:
    config = parsed(order.argv)
    log_in_lines("", as_json=config.folders.log_format == "json")
    launch_server.check_machine(config.session_storage)
    model = config.model.load(config.folders.cache_dir)
    provide_home(config.folders.cache_dir)
    return uvloop.run(_supervise(config, model, order, drops))


async def _supervise(
    config: ServerConfig, model: ModelFacts, order: StagesOrder, drops: LogDrops
) -> int:
    stopping, run_dir = asyncio.Event(), RunDir.make()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    zygote = Zygote() if is_useful() and not order.command else None
    supervisor = Supervisor(
        hosted_specs(config, model, order, run_dir.path),
        log_dir=config.folders.log_dir,
        command=order.command or STAGE_COMMAND,
        zygote=zygote,
        drops=drops,
    )
    reporting = vital(_report_changes(supervisor), "report")
    stopped = asyncio.create_task(stopping.wait())
    try:
        for addition in config.additions:
            addition.start(run_dir.path)
        starting = asyncio.create_task(supervisor.start())
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
        else:
            starting.result()
            await stopped
        return 0
    finally:
        reporting.cancel()
        forks = () if zygote is None else (zygote.close,)
        added = [addition.stop for addition in config.additions]
        await close_all(supervisor.stop, *added, *forks, run_dir.remove)


def hosted_specs(
    config: ServerConfig, model: ModelFacts, order: StagesOrder, run_dir: Path
) -> list[StageSpec]:
    """Those of a server with these stages alone, reached from other hosts.

    Raises:
        BadInputError: other machines can reach them, and there is no key.
    """
    here = replace(model, stages=tuple(s for s in model.stages if s in order.stages))
    key_file = config.stage_options.stage_key_file
    host = f"[{order.address}]" if ":" in order.address else order.address
    exposed = partial(msgspec.structs.replace, same_host=False, key_file=key_file)
    check_exposed((f"tcp://{host}:0",), key_file, allowed=False)
    return [
        exposed(spec, address=f"tcp://{host}:{free_port()}") if spec.stage in STAGES else spec
        for spec in stage_specs(config, here, run_dir, native_key="")
    ]


async def _report_changes(supervisor: Supervisor) -> None:
    last: HostNews | None = None
    while True:
        replicas = tuple(
            ReplicaNews(
                stage=replica.spec.stage,
                number=replica.spec.replica,
                address=replica.spec.address,
                is_up=replica.is_up,
                n_sessions=_said(replica, "sessions"),
                n_jobs=_said(replica, "jobs"),
            )
            for replica in supervisor.replicas
            if replica.spec.stage in STAGES
        )
        news = HostNews(protocol=protocol_hash(), replicas=replicas)
        if news != last:
            report(news)
            last = news
        await asyncio.sleep(_REPORT_EVERY_S)


def _said(replica: Replica, what: str) -> int:
    return int(replica.ready.load.get(what, 0)) if replica.ready else 0


if __name__ == "__main__":
    start_in_utf8_mode()
    sys.exit(main())
