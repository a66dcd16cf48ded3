"""Voices over a response, told apart by a speaker model: how well, how soon, and at what cost.

    python -m benchmark.turn_taking.other_voices --json out.json

Arms: `ignore_other_voices` off, and on with bounds of several strictness; all else is as by
default.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmark.load.provenance import facts
from benchmark.turn_taking.clips import SPLITS, read_clips, split_of
from benchmark.turn_taking.components import Hearing, RememberedScores, hear_interruptions
from benchmark.turn_taking.equal_errors import error_rows
from benchmark.turn_taking.scoring import interruption_figures
from benchmark.turn_taking.speaker_cost import cost, served
from benchmark.turn_taking.speakers import Listening, RememberedEmbeddings
from benchmark.turn_taking.stimuli import (
    INTERRUPTION,
    SECOND_SPEAKER,
    TELEVISION,
    by_telephone,
    long_clips,
    of_changed_users,
    of_other_people,
    over_echo,
    voices,
)
from benchmark.turn_taking.timeline import Stimulus
from sglang_live.interaction.filters.voiceprint import Voiceprint, parts_of
from sglang_live.interaction.silero import SileroModel
from sglang_live.interaction.vad import VadSettings
from sglang_live.models.packages import RESEMBLYZER, fetch
from sglang_live.models.resemblyzer import SpeakerEncoder

RECORDINGS = Path(__file__).parents[1] / "workloads" / "turns"
# None: the setting is off. 0: the server's bounds.
STRICTER = (None, -0.08, -0.04, 0.0, 0.04, 0.08)
SESSIONS = (1, 5, 25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", default=[RECORDINGS], metavar="DIR")
    parser.add_argument("--split", choices=SPLITS, default="held_out")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    directory = fetch(RESEMBLYZER, report=print)
    model = SpeakerEncoder.load(directory)
    clips = read_clips(args.data)
    own = [clip for clip in clips if split_of(clip.group) == args.split]
    stimuli = [
        *(s for s in voices(clips, args.split) if s.kind != TELEVISION),
        *over_echo(long_clips(own)),
        *of_changed_users(clips, args.split),
        *of_other_people(clips, args.split),
    ]
    narrow = (s for s in stimuli if s.kind in (INTERRUPTION, TELEVISION, SECOND_SPEAKER))
    stimuli += by_telephone(list(narrow))
    document = {
        "benchmark": "other_voices",
        **facts(),
        "config": {"split": args.split, "speaker_model": RESEMBLYZER.requirement},
        "voices": voice_rows(stimuli, model),
        "turns": turn_rows(stimuli, model),
        "equal_errors": error_rows(clips, model),
        "cost": cost(directory),
        "served": [served(model, n) for n in SESSIONS],
    }
    print("\n".join(tables(document)))
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def voice_rows(stimuli: Sequence[Stimulus], model: SpeakerEncoder) -> list[dict]:
    """One row for each kind of voice and arm."""
    speech, remembered = SileroModel(), RememberedEmbeddings(model)
    confirm_ms = VadSettings().confirm_ms
    rows = []
    for kind in dict.fromkeys(stimulus.kind for stimulus in stimuli):
        heard = [
            (s, Hearing(s.pcm, RememberedScores(speech), playing=s.playing, earlier=s.earlier))
            for s in stimuli
            if s.kind == kind
        ]
        for stricter in STRICTER:
            decided = []
            for stimulus, hearing in heard:
                if stricter is None:
                    found = hear_interruptions(hearing, confirm_ms, ignores=True)
                else:
                    found = Listening(hearing, remembered, confirm_ms, stricter).decisions()
                decided.append((stimulus.onset_ms, found))
            row = {"kind": kind, "stricter": stricter}
            rows.append(row | asdict(interruption_figures(decided)))
    return rows


def turn_rows(stimuli: Sequence[Stimulus], model: SpeakerEncoder) -> list[dict]:
    """What `ignore_other_turns` does with the voices as turns: one row for each kind."""
    rows: dict[str, dict] = {}
    for stimulus in stimuli:
        known = Voiceprint()
        before, turn = parts_of(stimulus.earlier), parts_of(stimulus.pcm)
        row = rows.setdefault(stimulus.kind, {"kind": stimulus.kind, "judged": 0, "ignored": 0})
        if before[0] and turn[0]:
            known.learn(model.embed(*before))
            row["judged"] += 1
            row["ignored"] += not known.is_of_user(model.embed(*turn))
    return list(rows.values())


def tables(document: dict) -> list[str]:
    return [
        *voice_table(document["voices"]),
        "",
        *strictness_table(document["voices"]),
        "",
        *turn_table(document["turns"]),
        "",
        *error_table(document["equal_errors"]),
        "",
        *cost_table(document),
    ]


def voice_table(rows: Sequence[dict]) -> list[str]:
    """With the setting off and on."""
    lines = [
        "| voice | n | stops, off | stops, on | reaction off, P50 / P95 | on, P50 / P95 "
        "| held, on: n, the longest |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        off, on = (_row(rows, kind, stricter) for stricter in (None, 0.0))
        held = f"{on['holds']}, {on['longest_hold_ms']:.0f} ms" if on["holds"] else "0"
        cells = kind, str(on["n"]), _stops(off), _stops(on), _reaction(off), _reaction(on), held
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def strictness_table(rows: Sequence[dict]) -> list[str]:
    """What each strictness costs and gains."""
    kinds = ("television", "second_speaker", "interruption", "interruption_of_a_word")
    changed = [
        kind
        for kind in dict.fromkeys(row["kind"] for row in rows)
        if kind.startswith("interruption_") and kind not in kinds
    ]
    lines = [
        f"| bounds | {' | '.join(kinds)} | reaction of an interruption, P50 / P95 "
        "| other interruptions |",
        f"|---|{'---|' * len(kinds)}---|---|",
    ]
    for stricter in STRICTER:
        own = [_row(rows, kind, stricter) for kind in kinds]
        others = [_row(rows, kind, stricter) for kind in changed]
        total = f"{sum(r['stops'] for r in others)} of {sum(r['n'] for r in others)}"
        name = "off" if stricter is None else f"{stricter:+.2f}" if stricter else "as chosen"
        cells = name, *map(_stops, own), _reaction(own[2]), total
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def turn_table(rows: Sequence[dict]) -> list[str]:
    shown = [row for row in rows if row["judged"]]
    return [
        "| as a turn, with `ignore_other_turns` | ignored |",
        "|---|---|",
        *(f"| {row['kind']} | {row['ignored']} of {row['judged']} |" for row in shown),
    ]


def error_table(rows: Sequence[dict]) -> list[str]:
    changes = list(dict.fromkeys(row["change"] for row in rows))
    lines = [
        f"| length | same, other pairs | {' | '.join(changes)} |",
        f"|---|---|{'---|' * len(changes)}",
    ]
    for duration_s in dict.fromkeys(row["duration_s"] for row in rows):
        own = {row["change"]: row for row in rows if row["duration_s"] == duration_s}
        first = own[changes[0]]
        cells = (
            f"{duration_s:g} s",
            f"{first['same']}, {first['other']}",
            *(f"{100 * own[change]['equal_error']:.0f} %" for change in changes),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def cost_table(document: dict) -> list[str]:
    spent = document["cost"]
    compared = ", ".join(f"{1000 * s:g} ms: {ms:.1f} ms" for s, ms in spent["comparison_ms"])
    lines = [
        f"CPU of a comparison by length of the voice: {compared}; of what a turn teaches "
        f"{spent['turn_ms']:.0f} ms; of a second of another person's voice "
        f"{spent['second_ms']:.0f} ms. Memory of the process: {spent['memory_mib']:.0f} MiB.",
        "",
        "| sessions with another person's voice at once | comparisons | P50 / P95 with waiting "
        "| late |",
        "|---|---|---|---|",
    ]
    for row in document["served"]:
        late = f"{row['late']} ({100 * row['late'] / row['comparisons']:.1f} %)"
        wait = f"{row['p50_ms']:.0f} / {row['p95_ms']:.0f} ms"
        lines.append(f"| {row['sessions']} | {row['comparisons']} | {wait} | {late} |")
    return lines


def _row(rows: Sequence[dict], kind: str, stricter: float | None) -> dict:
    [found] = [row for row in rows if (row["kind"], row["stricter"]) == (kind, stricter)]
    return found


def _stops(row: dict) -> str:
    return f"{row['stops']} of {row['n']}"


def _reaction(row: dict) -> str:
    p50, p95 = row["reaction_p50_ms"], row["reaction_p95_ms"]
    return "n/a" if p50 is None else f"{p50:.0f} / {p95:.0f} ms"


if __name__ == "__main__":
    main()
