"""Voice sessions under load: time to first audio, and continuity of playback.

    python -m benchmark.voice_load --policies off,all --sessions 1,4 --turns 4 --json out.json

Workload W2: each user speaks a recorded clip at real-time pace, listens to the end of the response,
waits as long as people do in conversation, and speaks again. W4, with --barge-in: some users
interrupt the response. W1, with --open-loop --turns 1: users arrive, ask one question and leave.
Every run has a fresh server.
"""

import json
import sys

from benchmark.load.config import LoadConfig, parse_args
from benchmark.load.device_times import device_table
from benchmark.load.point import RunResult, Workload, measure
from benchmark.load.provenance import facts
from benchmark.load.report import collect, document, notes
from benchmark.load.server import ServerError
from benchmark.load.tables import (
    interruption_table,
    open_loop_table,
    process_table,
    ratio_table,
    storm_table,
    table,
)

ASKED_FOR = (interruption_table, open_loop_table, storm_table, ratio_table)


def run_all(config: LoadConfig, workload: Workload, results: list[RunResult]) -> None:
    """Run the whole experiment; appends to `results` after each run."""
    runs = list(config.runs())
    for number, run in enumerate(runs, start=1):
        name = (
            f"[{number}/{len(runs)}] {run.policies}, {run.sessions} sessions, repeat {run.repeat}"
        )
        if run.rate_rps is not None:
            name += f", {run.rate_rps:g}/s"
        _say(f"{name}: starting the server")
        result = measure(config, run, workload)
        results.append(result)
        failed = sum(not row.record.ok for row in result.rows)
        _say(
            f"{name}: {len(result.rows)} turns, {failed} failed, in {result.wall_s:.0f} s "
            f"(server up after {result.server_start_s:.0f} s)"
        )


def main(argv: list[str] | None = None) -> int:
    config = parse_args(argv)
    results: list[RunResult] = []
    code = 0
    try:
        run_all(config, Workload.load(config), results)
    except (ServerError, ValueError) as error:
        _say(f"error: {error}")
        code = 1
    except KeyboardInterrupt:
        _say("interrupted: what was measured so far follows")
        code = 130
    if not results:
        return code or 1
    points = collect(results)
    print(table(points))
    beside = [process_table(results), device_table([result.device for result in results])]
    for text in [make(points) for make in ASKED_FOR] + beside:
        if text is not None:
            print("\n" + text)
    print("\n" + "\n".join(notes(points)))
    if config.json is not None:
        text = json.dumps(document(config, results, facts(config.device_model)), indent=1)
        config.json.write_text(text + "\n", "utf-8")
        _say(f"wrote {config.json}")
    return code


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
