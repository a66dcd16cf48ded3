"""Recordings and stimuli from a folder of clips with a manifest.jsonl.

A line of the manifest: `file`, `kind` (`speech`, `multiparty`, `noise`, `music`, …), `speakers`,
and for several speakers in one channel `segments` of [start_s, duration_s, speaker].

A split is fixed by the hash of a group's name. A group are recordings that share a speaker.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import soxr

from benchmark.turn_taking import sounds
from benchmark.turn_taking.cutting import Cut, Unit, turns_of
from benchmark.turn_taking.timeline import SAMPLES_PER_MS, Recording, Span, Turn
from sglang_live.core import INPUT_RATE_HZ

SPLITS = ("tune", "held_out")
# Longer than the longest silence of semantic_vad, so that it ends every turn.
GAP_MS = 9000.0
_LEAD_MS = 500.0
# After the last word, before the channel's next speaker.
_TAIL_MS = 150.0
_PAUSES = Path(__file__).parents[1] / "workloads" / "ami_pauses.json"


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    name: str
    kind: str
    group: str
    pcm: np.ndarray
    units: tuple[Unit, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A turn, from its first word to its last, in a recording of its own."""

    pcm: np.ndarray
    pauses: tuple[Span, ...]
    end_ms: float
    tone: np.ndarray
    ends: bool = True


def split_of(group: str) -> str:
    return SPLITS[hashlib.sha256(group.encode()).digest()[0] % 2]


def read_clips(folders: Iterable[Path]) -> list[Clip]:
    """All clips of the folders.

    Raises:
        FileNotFoundError: a folder has no manifest.jsonl.
    """
    rows: dict[str, tuple[Path, dict]] = {}
    for folder in folders:
        for line in (folder / "manifest.jsonl").read_text("utf-8").splitlines():
            row = json.loads(line)
            rows[Path(row["file"]).stem] = folder / Path(row["file"]).name, row
    groups = grouped({name: speakers_of(row) or [name] for name, (_, row) in rows.items()})
    return [
        Clip(name, row["kind"], groups[name], read_pcm(path), units_of(row))
        for name, (path, row) in sorted(rows.items())
    ]


def speakers_of(row: dict) -> list[str]:
    return sorted({*row.get("speakers", []), *(s for _, _, s in row.get("segments", []))})


def units_of(row: dict) -> tuple[Unit, ...]:
    return tuple(
        Unit(speaker, 1000 * start_s, 1000 * (start_s + lasts_s))
        for start_s, lasts_s, speaker in row.get("segments", [])
    )


def grouped(speakers: dict[str, Sequence[str]]) -> dict[str, str]:
    """Name of each recording's group: the first speaker of all that are connected with it."""
    group: dict[str, set[str]] = {}
    for names in speakers.values():
        joined = set(names).union(*(group.get(name, ()) for name in names))
        group.update(dict.fromkeys(joined, joined))
    return {recording: min(group[names[0]]) for recording, names in speakers.items()}


def read_pcm(source) -> np.ndarray:
    """[n] int16 at 16 kHz; several channels are averaged. source: a path or an open file."""
    sound, rate_hz = soundfile.read(source, dtype="float32", always_2d=True)
    return sounds.to_pcm(soxr.resample(sound.mean(axis=1), rate_hz, INPUT_RATE_HZ))


def meeting_recordings(clip: Clip) -> list[Recording]:
    """The turns of each speaker of a channel of all speakers.

    The annotation has no words: pauses are where the channel is silent within a turn.
    """
    found = []
    for speaker in sorted({unit.speaker for unit in clip.units}):
        cuts = turns_of(clip.units, speaker)
        parts = [part for cut in cuts if (part := _part_of(clip, cut)) is not None]
        if parts:
            found.append(session(f"{clip.name}/{speaker}", clip.group, "meetings", parts))
    return found


def _part_of(clip: Clip, cut: Cut) -> Part | None:
    """The turn, or what of it ends before others speak; None without a pause and without an end."""
    lasts_ms = len(clip.pcm) / SAMPLES_PER_MS
    silent_until_ms = lasts_ms if cut.next_ms is None else cut.next_ms
    ends = cut.alone and silent_until_ms - cut.end_ms >= _TAIL_MS
    pcm = clip.pcm[
        sounds.samples(cut.start_ms) : sounds.samples(min(cut.end_ms + _TAIL_MS, silent_until_ms))
    ]
    spans = sounds.sounding(pcm)
    if not spans or not (ends or len(spans) > 1):
        return None
    tone = sounds.room_tone(clip.pcm, clip.name)
    return Part(pcm, tuple(sounds.gaps(spans)), spans[-1].end_ms, tone, ends)


def drawn_dialogues(clips: Sequence[Clip], draws: int) -> list[Recording]:
    """Each speaker's clips as turns, with the clips' own pauses lasting as long as in a meeting."""
    lengths_ms = [1000 * s for s in json.loads(_PAUSES.read_text("utf-8"))["pause_s"]]
    found = []
    for group in sorted({clip.group for clip in clips}):
        own = [clip for clip in clips if clip.group == group]
        for draw in range(draws):
            name = f"{group}/{draw}"
            rng = sounds.rng_of(name)
            parts = [_drawn(clip, rng, lengths_ms) for clip in own]
            found.append(session(name, group, "dialogues", parts))
    return found


def _drawn(clip: Clip, rng: np.random.Generator, lengths_ms: Sequence[float]) -> Part:
    spans = sounds.sounding(clip.pcm)
    first, last = spans[0].start_ms, spans[-1].end_ms
    pcm = clip.pcm[sounds.samples(first) :]
    pauses = [Span(p.start_ms - first, p.end_ms - first) for p in sounds.gaps(spans)]
    tone = sounds.room_tone(clip.pcm, clip.name)
    drawn_ms = rng.choice(lengths_ms, len(pauses))
    stretched, longer = sounds.with_pauses(pcm, pauses, drawn_ms, tone)
    end_ms = last - first + sum(drawn_ms) - sum(p.lasts_ms for p in pauses)
    return Part(stretched, longer, float(end_ms), tone)


def session(
    name: str, group: str, source: str, parts: Sequence[Part], gap_ms: float = GAP_MS
) -> Recording:
    """The turns one after another, each followed by silence of its room."""
    sound = [sounds.lasting(parts[0].tone, sounds.samples(_LEAD_MS))]
    turns, start_ms = [], _LEAD_MS
    for part in parts:
        sound += [part.pcm, sounds.lasting(part.tone, sounds.samples(gap_ms))]
        until_ms = start_ms + len(part.pcm) / SAMPLES_PER_MS + gap_ms
        pauses = tuple(Span(p.start_ms + start_ms, p.end_ms + start_ms) for p in part.pauses)
        turns.append(Turn(start_ms, start_ms + part.end_ms, until_ms, pauses, part.ends))
        start_ms = until_ms
    return Recording(name, group, source, np.concatenate(sound), tuple(turns))
