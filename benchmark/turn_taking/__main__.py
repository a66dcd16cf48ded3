"""Ends of turns and interruptions, as the server decides them, on recordings of people.

python -m benchmark.turn_taking --json out.json
"""

import argparse
import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmark.gateway_servers.process import ServerProcess
from benchmark.load.provenance import facts
from benchmark.turn_taking import layouts
from benchmark.turn_taking.chart import draw
from benchmark.turn_taking.clips import SPLITS, split_of
from benchmark.turn_taking.components import VERDICT_MS, Hearing, RememberedScores, end_rules
from benchmark.turn_taking.report import (
    CONFIRM_MS,
    delays_at_share,
    end_rows,
    end_table,
    interruption_rows,
    interruption_table,
    rows_of,
    share_table,
)
from benchmark.turn_taking.through_server import Pace, hear_all, server_rules, sound_rules
from benchmark.turn_taking.timeline import Recording, Stimulus
from sglang_live.interaction.endpoint import SmartTurnModel, installed_model_path
from sglang_live.interaction.silero import SileroModel
from sglang_live.interaction.vad import VadSettings
from sglang_live.models.moonshine import MoonshineRecogniser
from sglang_live.models.packages import MOONSHINE, fetch

RECORDINGS = Path(__file__).parents[1] / "workloads" / "turns"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", default=[RECORDINGS], metavar="DIR")
    parser.add_argument("--layout", choices=sorted(layouts.READERS), default="clips")
    parser.add_argument("--split", choices=SPLITS, default="held_out")
    parser.add_argument("--draws", type=int, default=3, help="drawn dialogues per speaker")
    parser.add_argument(
        "--server",
        metavar="URL",
        help="measure ends of turns through this server, ws://HOST:PORT/v1/realtime, instead; "
        "`gateway`: through this project's gateway without stages, started for it. Also the first "
        "sounds of responses, in the realtime protocol and in the Live API",
    )
    parser.add_argument("--at-once", type=int, default=32, help="sessions, with --server")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--chart", type=Path, help="draw the curves here, SVG or PNG")
    args = parser.parse_args()
    path = installed_model_path()
    if path is None:
        parser.error("there is no endpoint model: install pipecat-ai")
    recordings, stimuli = layouts.READERS[args.layout](args.data, args.split, args.draws)
    if not recordings and not stimuli:
        parser.error(f"no recording in {args.data} is in the split {args.split}")
    if args.server:
        through_server(args, recordings, SmartTurnModel(path))
        return
    document = {
        "benchmark": "turn_taking",
        **facts(),
        "config": {
            "layout": args.layout,
            "split": args.split,
            "draws": args.draws,
            "verdict_ms": VERDICT_MS,
        },
        **measure(recordings, stimuli, SileroModel(), SmartTurnModel(path)),
    }
    print("\n".join(tables(document)))
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    if args.chart:
        draw(document["ends"], args.chart)


def measure(
    recordings: Sequence[Recording],
    stimuli: Sequence[Stimulus],
    speech: SileroModel,
    model: SmartTurnModel,
) -> dict:
    recogniser = MoonshineRecogniser.load(fetch(MOONSHINE))
    heard = [(r, Hearing(r.pcm, RememberedScores(speech), model, recogniser)) for r in recordings]
    ends = end_rows(heard, end_rules()) if heard else []
    over = [
        (s, Hearing(s.pcm, RememberedScores(speech), playing=s.playing, earlier=s.earlier))
        for s in stimuli
    ]
    return {
        "recordings": [
            {"name": r.name, "split": split_of(r.group), "source": r.source, "turns": len(r.turns)}
            for r in recordings
        ],
        "ends": ends,
        "delays_at_false_cutoffs": delays_at_share(ends),
        "interruptions": interruption_rows(over, CONFIRM_MS),
    }


def through_server(
    args: argparse.Namespace, recordings: Sequence[Recording], model: SmartTurnModel
) -> None:
    """The same settings offline and through the server."""
    rules, pace = server_rules(), Pace()
    names = {(rule.component, rule.setting) for rule in rules}
    own = [rule for rule in end_rules() if (rule.component, rule.setting) in names]
    speech = SileroModel()
    heard = [(r, Hearing(r.pcm, RememberedScores(speech), model)) for r in recordings]
    offline, served = end_rows(heard, own), []
    with contextlib.ExitStack() as stack:
        url = args.server
        if url == "gateway":
            url = stack.enter_context(ServerProcess("gateway", 1.0)).url
        for rule in (*rules, *sound_rules()):
            found = asyncio.run(hear_all(url, rule, recordings, args.at_once, pace))
            decided = list(zip(recordings, found, strict=True))
            served += rows_of(rule.component, rule.setting, decided)
    for title, rows in (("offline", offline), ("through the server", served)):
        print("\n".join([f"\n{title}:", *end_table(rows)]))
    print(f"\n{pace.late} of {pace.sent} packets were sent late")
    if args.json:
        document = {
            "benchmark": "turns_served",
            **facts(),
            "config": {"split": args.split, "draws": args.draws, "at_once": args.at_once},
            "server": "the gateway without stages" if args.server == "gateway" else "given",
            "offline": offline,
            "served": served,
            "packets": asdict(pace),
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def tables(document: dict) -> list[str]:
    confirm_ms = VadSettings().confirm_ms
    return [
        *end_table(document["ends"]),
        "",
        *share_table(document["delays_at_false_cutoffs"]),
        "",
        *interruption_table(document["interruptions"], confirm_ms),
    ]


if __name__ == "__main__":
    main()
