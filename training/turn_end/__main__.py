"""Fit the numbers of interaction/turn_end.json on the split `tune` and on two telephone calls.

    python -m training.turn_end
    python -m training.turn_end --calls DIR

With --calls the pauses of the calls are read anew from their recordings: the four
`Auto_Repairs_{40,49}_UTC_*.wav` from aws-samples/amazon-transcribe-live-call-analytics, commit
b375717d, lca-chimevc-stack/asterisk-test-scripts/recordings (Apache-2.0). Without it they are
those of calls.jsonl. It takes a minute.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from benchmark.turn_taking.__main__ import RECORDINGS
from benchmark.turn_taking.layouts import read_clip_folders
from sglang_live.interaction.endpoint import SmartTurnModel, installed_model_path
from sglang_live.interaction.silero import SileroModel
from sglang_live.interaction.turn_end import WEIGHTS
from training.turn_end.fit import SILENCE_MS, cutoff_costs, figures, fitted, held_back, waits
from training.turn_end.pauses import judged_pauses, read_calls, read_pauses, write_pauses

CALLS = Path(__file__).with_name("calls.jsonl")
DRAWS = 3
LICENCES = (
    "AMI Meeting Corpus and LibriSpeech CC BY 4.0; LJSpeech and the address of a president public "
    "domain; pocketsphinx BSD-2-Clause; calls Apache-2.0"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=Path, metavar="DIR", help="read their recordings here")
    args = parser.parse_args()
    path = installed_model_path()
    assert path is not None, "there is no endpoint model: install pipecat-ai"
    speech, model = SileroModel(), SmartTurnModel(path)
    if args.calls:
        write_pauses(judged_pauses(read_calls(args.calls), speech, model, DRAWS), CALLS)
    recordings, _ = read_clip_folders([RECORDINGS], "tune", DRAWS)
    pauses = [*judged_pauses(recordings, speech, model, DRAWS), *read_pauses(CALLS)]
    judged = held_back(pauses)
    costs = cutoff_costs(judged)
    sums = {
        name: {
            "silence": figures([(pause, silence_ms) for pause, _ in judged]),
            "turn_end": figures(waits(judged, costs[name])),
        }
        for name, silence_ms in SILENCE_MS.items()
    }
    ends = [pause for pause in pauses if pause.is_end]
    document = {
        "what": "Numbers of interaction/turn_end.py, fitted by python -m training.turn_end",
        "data": "split tune of benchmark/workloads/turns; two telephone calls "
        "(training/turn_end/calls.jsonl)",
        "licences": LICENCES,
        "pauses": len(pauses) - len(ends),
        "ends": len(ends),
        "groups": sorted({pause.group for pause in pauses}),
        "figures_with_each_group_held_back": sums,
        "weights": asdict(fitted(pauses, costs)),
    }
    WEIGHTS.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(WEIGHTS.read_text("utf-8"))


if __name__ == "__main__":
    main()
