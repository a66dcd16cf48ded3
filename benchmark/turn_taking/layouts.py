"""Readers of folders, by name: recordings of turns, and stimuli while the agent speaks.

`eot-bench`: rows of livekit/eot-bench-data as JSON lines beside their audio. `id`, `language`,
`audio` (a path) and `silence_spans` of {start, end} in seconds, the last of which is the turn's
end.

`full-duplex-bench`: folders `<task>/<id>/` of version 1.0 with `input.wav` and, by task,
`pause.json`, `turn_taking.json` or `interrupt.json`, each a list of {text, timestamp: [s, s]}; and
of 1.5 with `metadata.json`, whose `timestamps` are those of the user's sound.

`ami`: per speaker one channel `<meeting>.<speaker>.wav` and its words
`<meeting>.<speaker>.words.xml` (NXT: `w` and `vocalsound` with `starttime` and `endtime`).
"""

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from benchmark.turn_taking import sounds
from benchmark.turn_taking.clips import (
    GAP_MS,
    Part,
    drawn_dialogues,
    meeting_recordings,
    read_clips,
    read_pcm,
    session,
    split_of,
)
from benchmark.turn_taking.cutting import (
    LAUGHTER,
    MIN_PAUSE_MS,
    Unit,
    backchannels_of,
    turns_of,
)
from benchmark.turn_taking.stimuli import BACKCHANNEL, INTERRUPTION, stimuli
from benchmark.turn_taking.timeline import SAMPLES_PER_MS, Recording, Span, Stimulus, Turn

Found = tuple[list[Recording], list[Stimulus]]

_FDB_KINDS = {
    "user_interruption": INTERRUPTION,
    "user_backchannel": BACKCHANNEL,
    "talking_to_other": "side_talk",
    "background_speech": "background_speech",
}


def read_clip_folders(folders: Sequence[Path], split: str, draws: int) -> Found:
    clips = read_clips(folders)
    own = [clip for clip in clips if split_of(clip.group) == split]
    speech = [clip for clip in own if clip.kind == "speech"]
    found = [r for clip in own if clip.kind == "multiparty" for r in meeting_recordings(clip)]
    return found + drawn_dialogues(speech, draws), stimuli(clips, split)


def read_eot_bench(folders: Sequence[Path], split: str, draws: int) -> Found:
    found = []
    for path in (path for folder in folders for path in sorted(folder.glob("*.jsonl"))):
        for line in path.read_text("utf-8").splitlines():
            row = json.loads(line)
            if split_of(row["id"]) == split:
                found.append(_eot_recording(row, path.parent))
    return found, []


def _eot_recording(row: dict, folder: Path) -> Recording:
    pcm = read_pcm(folder / row["audio"])
    spans = [Span(1000 * s["start"], 1000 * s["end"]) for s in row["silence_spans"]]
    pauses = tuple(span for span in spans[:-1] if span.lasts_ms >= MIN_PAUSE_MS)
    return _one_turn(row["id"], row["language"], pcm, spans[-1].start_ms, pauses)


def _one_turn(
    name: str, source: str, pcm: np.ndarray, end_ms: float | None, pauses: tuple[Span, ...]
) -> Recording:
    """A recording of one turn, followed by silence. end_ms: None if the end is not annotated."""
    tone = sounds.room_tone(pcm, name)
    heard = np.concatenate((pcm, sounds.lasting(tone, sounds.samples(GAP_MS))))
    lasts_ms = len(heard) / SAMPLES_PER_MS
    end = len(pcm) / SAMPLES_PER_MS if end_ms is None else end_ms
    turn = Turn(0.0, end, lasts_ms, pauses, end_ms is not None)
    return Recording(name, name, source, heard, (turn,))


def read_full_duplex_bench(folders: Sequence[Path], split: str, draws: int) -> Found:
    recordings: list[Recording] = []
    found: list[Stimulus] = []
    for folder in folders:
        for path in sorted(folder.rglob("input.wav")):
            name = f"{path.parent.parent.name}/{path.parent.name}"
            if split_of(name) != split:
                continue
            recordings += _fdb_recordings(name, path)
            found += _fdb_stimuli(name, path)
    return recordings, found


def _fdb_recordings(name: str, path: Path) -> Iterable[Recording]:
    task = path.parent.parent.name
    if (pauses := path.with_name("pause.json")).is_file():
        spans = tuple(Span(*times) for times in _times_ms(pauses))
        yield _one_turn(name, task, read_pcm(path), None, spans)
    if (turns := path.with_name("turn_taking.json")).is_file():
        end_ms = _times_ms(turns)[0][0]
        pcm = read_pcm(path)[: sounds.samples(end_ms)]
        yield _one_turn(name, task, pcm, end_ms, ())


def _fdb_stimuli(name: str, path: Path) -> Iterable[Stimulus]:
    """The input from a second before the sound: what comes earlier is the user's own question."""
    folder = path.parent
    if (file := folder / "interrupt.json").is_file():
        kind, times_ms = INTERRUPTION, _times_ms(file)
    elif (file := folder / "metadata.json").is_file():
        kind = _FDB_KINDS.get(folder.parent.name, folder.parent.name)
        start_s, end_s = json.loads(file.read_text("utf-8"))["timestamps"]
        times_ms = [(1000 * start_s, 1000 * end_s)]
    else:
        return
    pcm = read_pcm(path)
    for start_ms, end_ms in times_ms:
        first_ms = max(0.0, start_ms - 1000)
        part = pcm[sounds.samples(first_ms) : sounds.samples(end_ms + 1000)]
        yield Stimulus(name, name, kind, part, start_ms - first_ms)


def _times_ms(path: Path) -> list[tuple[float, float]]:
    rows = json.loads(path.read_text("utf-8"))
    return [(1000 * row["timestamp"][0], 1000 * row["timestamp"][1]) for row in rows]


def read_ami(folders: Sequence[Path], split: str, draws: int) -> Found:
    recordings: list[Recording] = []
    found: list[Stimulus] = []
    for folder in folders:
        for meeting in sorted({path.name.split(".")[0] for path in folder.glob("*.words.xml")}):
            if split_of(meeting) == split:
                units = [u for p in sorted(folder.glob(f"{meeting}.*.words.xml")) for u in words(p)]
                for speaker in sorted({unit.speaker for unit in units}):
                    pcm = read_pcm(folder / f"{speaker}.wav")
                    recordings += _ami_recordings(meeting, speaker, units, pcm)
                    found += _ami_stimuli(meeting, speaker, units, pcm)
    return recordings, found


def words(path: Path) -> list[Unit]:
    """Words and laughter of a speaker. Punctuation and other sounds are left out."""
    speaker = path.name.removesuffix(".words.xml")
    units = []
    for element in ElementTree.parse(path).getroot():
        start, end = element.get("starttime"), element.get("endtime")
        laughs = element.tag == "vocalsound" and element.get("type") == "laugh"
        if (
            start is None
            or end is None
            or element.get("punc")
            or not (element.tag == "w" or laughs)
        ):
            continue
        text = LAUGHTER if laughs else element.text or ""
        units.append(Unit(speaker, 1000 * float(start), 1000 * float(end), text))
    return units


def _ami_recordings(
    meeting: str, speaker: str, units: Sequence[Unit], pcm: np.ndarray
) -> Iterable[Recording]:
    tone = sounds.room_tone(pcm, speaker)
    parts = []
    for cut in turns_of(units, speaker):
        turn = pcm[sounds.samples(cut.start_ms) : sounds.samples(cut.end_ms)]
        pauses = tuple(Span(p.start_ms - cut.start_ms, p.end_ms - cut.start_ms) for p in cut.pauses)
        parts.append(Part(turn, pauses, cut.end_ms - cut.start_ms, tone))
    if parts:
        yield session(speaker, meeting, "meetings", parts)


def _ami_stimuli(
    meeting: str, speaker: str, units: Sequence[Unit], pcm: np.ndarray
) -> Iterable[Stimulus]:
    for own, span in backchannels_of(units):
        if own == speaker:
            first_ms = max(0.0, span.start_ms - 1000)
            part = pcm[sounds.samples(first_ms) : sounds.samples(span.end_ms + 1000)]
            name = f"{speaker}/{span.start_ms:.0f}"
            yield Stimulus(name, meeting, BACKCHANNEL, part, span.start_ms - first_ms)


READERS: dict[str, Callable[[Sequence[Path], str, int], Found]] = {
    "clips": read_clip_folders,
    "eot-bench": read_eot_bench,
    "full-duplex-bench": read_full_duplex_bench,
    "ami": read_ami,
}
