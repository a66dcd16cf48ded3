"""Starts or changes a cluster: `python -m sglang_live.launch_cluster cluster.toml`.

Ray places hosts of stages and gateways, as cluster.toml says (cluster/spec.py), and starts them
again where machines are left. Run it again after a change of the file or of the version: new ones
come first, and old ones drain.
"""

import argparse
import asyncio
import math
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from sglang_live.cluster.safety import NICENESS_ENV, ray_facts
from sglang_live.cluster.spec import (
    MANAGER,
    NAMESPACE,
    ClusterSpec,
    check_model,
    parsed,
    read_spec,
)
from sglang_live.cluster.state import Status
from sglang_live.environment import start_in_utf8_mode
from sglang_live.errors import BadInputError, LiveError
from sglang_live.flags import HelpFormatter
from sglang_live.launch_server import end_in_one_line
from sglang_live.telemetry.log_lines import log_in_lines

_LOCAL = "local"
# What Ray's head has beside its cores.
_HEAD = "node:__internal_head__"
_STEP_S = 0.5
_REACHED_S = 10.0


def main(argv: list[str] | None = None) -> int:
    log_in_lines("")
    return end_in_one_line(lambda: _main(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "sglang_live.launch_cluster",
        usage="%(prog)s cluster.toml [--address auto|local|HOST:PORT] ...",
        description=__doc__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, help="what the cluster is to have")
    parser.add_argument(
        "--address",
        default="auto",
        help="of Ray's head; auto: as Ray finds it; local: a Ray of its own on this machine, which "
        "ends with this program (default: auto)",
    )
    does = parser.add_mutually_exclusive_group()
    does.add_argument("--check", action="store_true", help="check the file, and do nothing")
    does.add_argument("--drain", metavar="NAME", help="replace a host or gateway by another one")
    does.add_argument("--stop", action="store_true", help="end all hosts and gateways now")
    return parser


def _main(own: argparse.Namespace) -> int:
    spec = read_spec(own.file)
    _check_model(spec)
    if own.check:
        n, _ = spec.size()
        print(f"{own.file} is right: {n} hosts and gateways")
        return 0
    ray = _ray()
    if own.address == _LOCAL and (own.stop or own.drain):
        raise BadInputError("--address local: only its own program changes such a cluster")
    if own.address == _LOCAL:
        spec = _of_one_machine(spec)
        _, cpus = spec.size()
        print("a Ray of this machine alone: calls end with it, so its safety is not checked")
        os.environ[NICENESS_ENV] = "0"
        ray.init(
            address=_LOCAL,
            num_cpus=math.ceil(cpus),
            include_dashboard=False,
            namespace=NAMESPACE,
            log_to_driver=False,
        )
    else:
        try:
            _check_reached(own.address)
            ray.init(address=own.address, namespace=NAMESPACE, log_to_driver=False)
        except (OSError, RuntimeError, ValueError) as error:
            raise LiveError(f"no Ray at {own.address}: {error}") from None
        if not (own.stop or own.drain):
            _refuse_if_unfit()
    try:
        return _change(own, spec)
    finally:
        ray.shutdown()


def _check_reached(address: str) -> None:
    """Raises OSError if nothing is at HOST:PORT: Ray would wait there for minutes."""
    place = urlsplit(f"//{address}")
    if place.hostname is not None and place.port is not None:
        socket.create_connection((place.hostname, place.port), _REACHED_S).close()


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise BadInputError("a cluster needs Ray: pip install 'sglang-live[cluster]'") from None
    return ray


def _check_model(spec: ClusterSpec) -> None:
    config = parsed(["--model-path", spec.model_path])
    check_model(spec, config.model.load(config.folders.cache_dir))


def _of_one_machine(spec: ClusterSpec) -> ClusterSpec:
    return msgspec.structs.replace(spec, zones=[], address=spec.address or "127.0.0.1")


def _refuse_if_unfit() -> None:
    """Raises BadInputError for a Ray on which calls must not depend."""
    if faults := ray_facts().faults():
        raise BadInputError(f"this Ray cluster is not safe for calls: {'; '.join(faults)}")


def _change(own: argparse.Namespace, spec: ClusterSpec) -> int:
    import ray

    manager = _manager()
    if own.stop:
        ray.get(manager.stop.remote())
        ray.kill(manager)
        print("all hosts and gateways have ended")
        return 0
    if own.drain:
        if not ray.get(manager.drain.remote(own.drain)):
            known = ", ".join(one.name for one in _status(manager))
            raise BadInputError(f"--drain {own.drain}: there are {known}")
        print(f"{own.drain} drains")
        return 0
    ray.get(manager.apply.remote(msgspec.json.encode(spec)))
    asyncio.run(_serve(manager, stays=own.address == _LOCAL))
    return 0


def _manager() -> Any:
    """That of this version: an older one is replaced, and its hosts stay."""
    import ray

    from sglang_live.cluster.manager import ClusterManager, manager_version

    try:
        present = ray.get_actor(MANAGER, namespace=NAMESPACE)
        if ray.get(present.version.remote()) == manager_version():
            return present
        ray.kill(present)
        while True:  # until its name is free
            ray.get_actor(MANAGER, namespace=NAMESPACE)
            time.sleep(_STEP_S)
    except ValueError:
        pass  # there is none
    kind = ray.remote(ClusterManager)
    return kind.options(
        name=MANAGER,
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        # What is asked while it starts again is asked then; asking twice does no harm.
        max_task_retries=-1,
        num_cpus=0,
        # Other machines come and go.
        resources={_HEAD: 0.001},
    ).remote()


def _status(manager: Any) -> list[Status]:
    import ray

    return msgspec.json.decode(ray.get(manager.status.remote()), type=list[Status])


async def _serve(manager: Any, *, stays: bool) -> None:
    """Tell what becomes of hosts and gateways, until all serve; with `stays`, until a signal.

    Raises:
        LiveError: a signal came before.
    """
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    told: dict[str, str] = {}
    is_settled = False
    while not stopping.is_set():
        status = await asyncio.to_thread(_status, manager)
        for one in status:
            if (text := _text(one)) != told.get(one.name):
                told[one.name] = text
                print(text, flush=True)
        is_settled |= bool(status) and all(one.state == "serving" for one in status)
        if is_settled and not stays:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_STEP_S):
                await stopping.wait()
    if not is_settled:
        raise LiveError("interrupted; what was started goes on, unless Ray is this program's own")


def _text(one: Status) -> str:
    where = one.url or ", ".join(f"{row.replica} {row.address}" for row in one.replicas)
    return " ".join(filter(None, (one.name, one.state, where, one.error)))


if __name__ == "__main__":
    start_in_utf8_mode()
    sys.exit(main())
