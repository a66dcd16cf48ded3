"""How long a user waits when a process of a fleet is lost, with real engines.

    python -m benchmark.failover --json out.json
    python -m benchmark.failover --arms vocoder,silent --n 5

Two hosts with all stages, two gateways with a journal, and an entry, on this machine (fleet.py). In
the middle of a response a stage is killed, a host stands still, or the gateway is killed; what was
lost is there again before the next response. `drain`: hosts are taken away while users have turn
after turn. `path`: the first audio with stages of the server's own, on hosts, and with a journal.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmark.failover.fleet import NAMES, START_TIMEOUT_S, Fleet, running_fleet
from benchmark.failover.losses import Drains, Row, drain, first_audio_ms, lose, settled
from benchmark.failover.report import KILLED, figures_of, table
from benchmark.load.options import check_names, parser_of
from benchmark.load.provenance import config_of, facts
from benchmark.load.server import ServerProcess

# Arms of which each is lost once in a round: a stage's process, a host, nothing.
ROUND = (*KILLED, "silent", "undisturbed_in_text", "undisturbed")
ARMS = (*ROUND, "gateway", "drain", "path")
PATHS = ("own", "hosts", "journal")


@dataclass(frozen=True, kw_only=True)
class Options:
    """One flag per field.

    arms: separated by commas.
    n: losses of each kind, and drains.
    buffered_s: audio that the listener has not heard when something is lost; of the thinker, whose
        loss is earliest in a response, none.
    users: that have turns while hosts drain.
    paths: first audio of each path.
    """

    arms: str = ",".join(ARMS)
    n: int = 20
    buffered_s: float = 0.6
    users: int = 2
    paths: int = 100
    model_path: str = "demo-random"
    json: str = ""


async def measure_losses(fleet: Fleet, options: Options, arms: Sequence[str]) -> list[Row]:
    rows: list[Row] = []
    async with fleet.entry() as entry:
        await lose(fleet, entry, "undisturbed", options.buffered_s)  # everything runs once
        rounds = [[arm for arm in ROUND if arm in arms]] * options.n
        if "gateway" in arms:
            rounds += [["gateway"]] * options.n
        for number, round_ in enumerate(rounds, start=1):
            for arm in round_:
                rows.append(await lose(fleet, entry, arm, options.buffered_s))
                _say(f"{number}/{len(rounds)} {rows[-1]}")
    return rows


async def measure_paths(fleet: Fleet, own: ServerProcess, n: int) -> dict[str, list[float]]:
    """First audio in ms, by path."""
    await settled(fleet)
    [gateway, *_] = fleet.gateways
    urls = {"own": own.url, "hosts": gateway.url, "journal": gateway.url}
    found: dict[str, list[float]] = {path: [] for path in PATHS}
    for number in range(-5, n):
        for path in PATHS:
            ms = await first_audio_ms(urls[path], resumable=path == "journal")
            if number >= 0:
                found[path].append(ms)
    return found


async def measure(
    fleet: Fleet, options: Options, arms: Sequence[str]
) -> tuple[list[Row], dict[str, list[float]], Drains | None]:
    """In one event loop: gateways end with the thread that has started them, one of its own."""
    rows: list[Row] = []
    drains: Drains | None = None
    paths: dict[str, list[float]] = {}
    if {*ROUND, "gateway"} & {*arms}:
        rows = await measure_losses(fleet, options, arms)
    if "path" in arms:
        with ServerProcess(options.model_path, "+".join(NAMES), (), START_TIMEOUT_S) as own:
            paths = await measure_paths(fleet, own, options.paths)
    if "drain" in arms:
        drains = await drain(fleet, options.n, options.users)
    return rows, paths, drains


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(Options(), __doc__)
    options = Options(**vars(parser.parse_args(argv)))
    check_names(parser, "--arms", options.arms, ARMS)
    if min(options.n, options.users, options.paths) < 1 or not options.buffered_s > 0:
        parser.error("all numbers must be positive")
    arms, load_before, began_s = options.arms.split(","), os.getloadavg(), time.monotonic()
    with running_fleet(options.model_path) as fleet:
        _say(f"the fleet is up after {time.monotonic() - began_s:.0f} s")
        rows, paths, drains = asyncio.run(measure(fleet, options, arms))
    found = {
        "wall_s": round(time.monotonic() - began_s),
        "load_before": load_before,
        "figures": figures_of(rows),
        "drains": drains and asdict(drains),
        "first_audio_ms": paths,
    }
    print(table(found))
    if options.json:
        document = {"benchmark": "failover", **facts(), "config": config_of(options), **found}
        document["rows"] = [asdict(row) for row in rows]
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
