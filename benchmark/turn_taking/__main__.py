"""Ends of turns and interruptions, as the server decides them, on recordings of people.

python -m benchmark.turn_taking --json out.json
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

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
    share_table,
)
from benchmark.turn_taking.timeline import Recording, Stimulus
from sglang_live.interaction.endpoint import SmartTurnModel, installed_model_path
from sglang_live.interaction.silero import SileroModel
from sglang_live.interaction.vad import VadSettings

RECORDINGS = Path(__file__).parents[1] / "workloads" / "turns"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", default=[RECORDINGS], metavar="DIR")
    parser.add_argument("--layout", choices=sorted(layouts.READERS), default="clips")
    parser.add_argument("--split", choices=SPLITS, default="held_out")
    parser.add_argument("--draws", type=int, default=3, help="drawn dialogues per speaker")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--chart", type=Path, help="draw the curves here, SVG or PNG")
    args = parser.parse_args()
    path = installed_model_path()
    if path is None:
        parser.error("there is no endpoint model: install pipecat-ai")
    recordings, stimuli = layouts.READERS[args.layout](args.data, args.split, args.draws)
    if not recordings and not stimuli:
        parser.error(f"no recording in {args.data} is in the split {args.split}")
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
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    if args.chart:
        draw(document["ends"], args.chart)


def measure(
    recordings: Sequence[Recording],
    stimuli: Sequence[Stimulus],
    speech: SileroModel,
    model: SmartTurnModel,
) -> dict:
    heard = [(r, Hearing(r.pcm, RememberedScores(speech), model)) for r in recordings]
    ends = end_rows(heard, end_rules()) if heard else []
    over = [(s, Hearing(s.pcm, RememberedScores(speech), playing=s.playing)) for s in stimuli]
    return {
        "recordings": [
            {"name": r.name, "split": split_of(r.group), "source": r.source, "turns": len(r.turns)}
            for r in recordings
        ],
        "ends": ends,
        "delays_at_false_cutoffs": delays_at_share(ends),
        "interruptions": interruption_rows(over, CONFIRM_MS),
    }


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
