"""Pauses in annotated recordings, as the server sees them: evidence, and whether the turn was over.

In: recordings of benchmark.turn_taking. Out: JudgedPause.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmark.turn_taking import sounds
from benchmark.turn_taking.clips import read_pcm
from benchmark.turn_taking.components import Hearing, RememberedScores, packets
from benchmark.turn_taking.cutting import Unit, turns_of
from benchmark.turn_taking.timeline import SAMPLES_PER_MS, Recording, Turn
from sglang_live.interaction.endpoint import MODEL_SAMPLES, EndpointModel
from sglang_live.interaction.silero import SileroModel
from sglang_live.interaction.turn_end import PAUSE_MS, word_evidence
from sglang_live.interaction.vad import (
    SpeechDetector,
    SpeechPaused,
    SpeechResumed,
    SpeechStarted,
    SpeechStopped,
    VadSettings,
)
from sglang_live.models.speech import Recogniser

# Longer than what is waited for at most: pauses and ends are seen to their end.
_SILENCE_MS = 3200
LATE_MS = 700
# Between the annotated end of a turn and the detector's last voiced sound.
_EARLY_MS, _LATE_MS = 150.0, 500.0
# As the detector pads a turn that begins after another speaker's.
_PADDING_MS = 300.0
# Their clips are cut within a sentence, so that only their pauses count.
CUT_CLIPS = ("LJSpeech", "LibriSpeech-1088")
# Fading is measured in the last two seconds before the pause.
_FRAME_SAMPLES = 10 * SAMPLES_PER_MS
_LOUD_FRAMES, _LAST_FRAMES, _LOUD_PERCENTILE = 200, 10, 90


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedPause:
    """
    group: the speaker, the meeting or the call.
    lasts_ms: of a pause within the turn; of the turn's end until the user speaks again.
    score, late_score: the endpoint model's, after PAUSE_MS and after LATE_MS of silence; None: it
        is over by then.
    fade_db, turn_ms: how far the voice fades before the pause, how long the turn has lasted.
    words: their evidence (interaction/turn_end.py); None: they are not known.
    weight: how much it counts; the draws of one clip count as one together.
    """

    group: str
    source: str
    is_end: bool
    lasts_ms: float
    score: float
    late_score: float | None
    fade_db: float
    turn_ms: float
    weight: float
    words: float | None = None


def judged_pauses(
    recordings: Iterable[Recording],
    speech: SileroModel,
    model: EndpointModel,
    draws: int,
    recogniser: Recogniser | None = None,
) -> list[JudgedPause]:
    """recogniser: None: the words stay unknown."""
    found = []
    for recording in recordings:
        hearing = Hearing(recording.pcm, RememberedScores(speech), model, recogniser)
        weight = 1 / draws if recording.source == "dialogues" else 1.0
        for start_ms, pause, until_ms in _silences(hearing):
            judged = _judged(recording, hearing, start_ms, pause, until_ms, weight)
            found += [] if judged is None else [judged]
    return found


def _silences(hearing: Hearing) -> Iterable[tuple[float, SpeechPaused, float]]:
    """Each silence of PAUSE_MS: the start of its speech, the silence, and where it is over."""
    settings = VadSettings(silence_duration_ms=_SILENCE_MS, pause_ms=PAUSE_MS)
    detector = SpeechDetector(hearing.scores, settings)
    start_ms, pause = 0.0, None
    for at_ms, packet in packets(hearing.pcm):
        for event in detector.feed(packet):
            match event:
                case SpeechStarted():
                    start_ms = event.at_ms
                case SpeechPaused():
                    pause = event
                case SpeechResumed() | SpeechStopped() if pause is not None:
                    yield start_ms, pause, at_ms
                    pause = None


def _judged(
    recording: Recording,
    hearing: Hearing,
    start_ms: float,
    pause: SpeechPaused,
    until_ms: float,
    weight: float,
) -> JudgedPause | None:
    """None if it is unclear whether the turn is over."""
    end_ms = pause.speech_end_ms
    turn = next((t for t in recording.turns if t.start_ms - 400 <= end_ms < t.until_ms), None)
    if turn is None:
        return None
    is_end = end_ms >= turn.end_ms - _EARLY_MS
    cut = recording.group in CUT_CLIPS or not turn.ends
    if is_end and (cut or end_ms > turn.end_ms + _LATE_MS):
        return None
    start_ms = max(start_ms, turn.start_ms - _PADDING_MS)
    first, last, end = (round(ms * SAMPLES_PER_MS) for ms in (start_ms, end_ms, pause.at_ms))
    late = last + LATE_MS * SAMPLES_PER_MS if until_ms - end_ms >= LATE_MS else None
    return JudgedPause(
        group=recording.group,
        source=recording.source,
        is_end=is_end,
        lasts_ms=until_ms - end_ms,
        score=round(hearing.completeness(first, end), 5),
        late_score=None if late is None else round(hearing.completeness(first, late), 5),
        fade_db=round(fade_db(recording.pcm[max(first, end - MODEL_SAMPLES) : last]), 2),
        turn_ms=round(end_ms - start_ms),
        weight=weight,
        words=None if hearing.recogniser is None else word_evidence(hearing.words(first, end)),
    )


def fade_db(voice: np.ndarray) -> float:
    """Level of a voice's last 100 ms above that of its loud parts, in dB.

    voice: [n] int16, 16 kHz, up to the last voiced sound. 0 if it is shorter than 100 ms.
    """
    n_frames = min(len(voice) // _FRAME_SAMPLES, _LOUD_FRAMES)
    if n_frames < _LAST_FRAMES:
        return 0.0
    frames = voice[len(voice) - n_frames * _FRAME_SAMPLES :].astype(np.float32)
    power = np.square(frames.reshape(n_frames, _FRAME_SAMPLES)).mean(axis=1)
    db = 20 * np.log10(np.sqrt(power) + 1)  # of digital silence 0, not minus infinity
    return float(db[-_LAST_FRAMES:].mean() - np.percentile(db, _LOUD_PERCENTILE))


def read_calls(folder: Path) -> list[Recording]:
    """Telephone calls with a channel for each speaker, `<call>_<speaker>.wav`.

    Where a channel sounds is a unit of its speaker. Each channel is the recording of one user.
    """
    found = []
    for call in sorted({path.stem.rpartition("_")[0] for path in folder.glob("*.wav")}):
        paths = sorted(folder.glob(f"{call}_*.wav"))
        sound = {path.stem.rpartition("_")[2]: read_pcm(path) for path in paths}
        units = [
            Unit(name, span.start_ms, span.end_ms)
            for name, pcm in sound.items()
            for span in sounds.sounding(pcm)
        ]
        for name, pcm in sound.items():
            turns = _turns(units, name, len(pcm) / SAMPLES_PER_MS)
            found.append(Recording(f"{call}/{name}", call, "calls", pcm, turns))
    return found


def _turns(units: Sequence[Unit], speaker: str, lasts_ms: float) -> tuple[Turn, ...]:
    starts = sorted(unit.start_ms for unit in units if unit.speaker == speaker)
    return tuple(
        Turn(
            cut.start_ms,
            cut.end_ms,
            min((at for at in starts if at > cut.end_ms), default=lasts_ms),
            cut.pauses,
            cut.alone,
        )
        for cut in turns_of(units, speaker)
    )


def read_pauses(path: Path) -> list[JudgedPause]:
    return [JudgedPause(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]


def write_pauses(pauses: Iterable[JudgedPause], path: Path) -> None:
    path.write_text("".join(json.dumps(asdict(pause)) + "\n" for pause in pauses), "utf-8")
