"""Where the schedulers' threads wait for the GPU while they serve: each place with its stack.

One turn, one interruption and the turn after it, as in the check of the whole server, with
PyTorch's sync debug mode on. On a CPU nothing waits, and the check shows that it runs.
"""

import json
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.gpu import server
from benchmark.gpu.findings import Findings
from benchmark.gpu.places import environment
from lab import sync_log
from lab.attachment import importable, joined

N_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    model_path: str = "demo"
    interrupted_after_s: float = 0.5
    start_timeout_s: float = 200.0
    turn_timeout_s: float = 30.0


TINY = Options()


def run(options: Options, device: str, seed: int) -> Findings:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(environment(joined(sync_log.environment(Path(folder)), importable())))
        fields = {name: getattr(options, name) for name in options.__slots__}
        found = server.run(server.Options(**fields), device, seed)
        documents = [
            json.loads(path.read_text("utf-8")) for path in sorted(Path(folder).glob("*.json"))
        ]
    return judge(documents, found.problems)


def judge(documents: list[dict[str, Any]], problems: tuple[str, ...]) -> Findings:
    """documents: one per scheduler."""
    engines = sorted(document["engine"] for document in documents)
    if engines != ["talker", "thinker"]:
        problems = (*problems, f"logs of {engines or 'no engine'}, expected talker and thinker")
    places = [
        {"engine": document["engine"], **place}
        for document in documents
        for place in document["places"]
    ]
    places.sort(key=lambda place: -place["n"])
    lines = [f"{len(places)} places wait, {sum(place['n'] for place in places)} times"]
    for place in places[:N_SHOWN]:
        innermost = place["stack"][:3]
        lines.append(f"{place['n']:6d}  {place['engine']} {place['thread']}")
        lines += [f"        {frame}" for frame in innermost]
    return Findings({"places": places}, problems, tuple(lines))
