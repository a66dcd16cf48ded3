"""`semantic_vad` on recordings of people, against silence alone: interruptions and waiting times.

    python -m benchmark.endpoint --clips DIR [DIR ...] --json out.json

Recordings of one speaker each, followed by a second of silence. In each pause of 200 ms or more the
detection could interrupt the speaker. Some pauses are ends of sentences, where a listener might
answer too, so the share is an upper bound. After the last word the turn is over: the time until
this is detected is measured.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import soundfile
import soxr

from benchmark.load.provenance import facts
from sglang_live.core import INPUT_RATE_HZ
from sglang_live.gateway.realtime.turns.endpointing import _EAGERNESS, PAUSE_MS
from sglang_live.interaction.endpoint import MODEL_SAMPLES, SmartTurnModel, installed_model_path
from sglang_live.interaction.silero import SileroModel
from sglang_live.interaction.vad import SpeechDetector, SpeechPaused, SpeechStarted, VadSettings

_SAMPLES_PER_MS = INPUT_RATE_HZ // 1000
_SILENCES_MS = (300, 500, 700, 1200)
_TAIL_MS = 1000


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause in a recording.

    lasts_ms: duration; None after the last word.
    score: completeness of the turn after 200 ms of silence, by the endpoint model.
    """

    clip: str
    at_ms: int
    lasts_ms: int | None
    score: float
    took_ms: float


def load(path: Path) -> np.ndarray:
    """[n] int16 at 16 kHz, followed by silence."""
    sound, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    sound = soxr.resample(sound.mean(axis=1), rate_hz, INPUT_RATE_HZ)
    pcm = (np.clip(sound, -1, 1) * 32767).astype(np.int16)
    return np.concatenate([pcm, np.zeros(_TAIL_MS * _SAMPLES_PER_MS, np.int16)])


def pauses_of(path: Path, speech: SileroModel, model: SmartTurnModel) -> list[Pause]:
    pcm = load(path)
    settings = VadSettings(silence_duration_ms=60_000, pause_ms=PAUSE_MS)
    detector = SpeechDetector(speech, settings)
    begun, found = 0, []
    onsets: list[int] = []  # where speech continues after a pause
    step = 32 * _SAMPLES_PER_MS
    for at in range(0, len(pcm) - step + 1, step):
        for event in detector.feed(pcm[at : at + step]):
            if isinstance(event, SpeechStarted):
                begun = event.at_ms * _SAMPLES_PER_MS
            elif isinstance(event, SpeechPaused):
                end = event.at_ms * _SAMPLES_PER_MS
                began_s = time.perf_counter()
                score = model.completeness(pcm[max(begun, end - MODEL_SAMPLES) : end])
                found.append((event, score, 1000 * (time.perf_counter() - began_s)))
            else:
                onsets.append(at // _SAMPLES_PER_MS)
    pauses = []
    for number, (event, score, took_ms) in enumerate(found):
        goes_on = onsets[number] if number < len(onsets) else None
        lasts_ms = None if goes_on is None else goes_on - event.speech_end_ms
        pauses.append(Pause(path.name, event.speech_end_ms, lasts_ms, score, took_ms))
    return pauses


def table(pauses: list[Pause]) -> list[dict]:
    within = [pause for pause in pauses if pause.lasts_ms is not None]
    ends = [pause for pause in pauses if pause.lasts_ms is None]
    rows = []
    for silence_ms in _SILENCES_MS:
        cut = np.mean([pause.lasts_ms >= silence_ms for pause in within])
        rows.append(_row(f"{silence_ms} ms of silence", float(cut), [silence_ms] * len(ends)))
    for eagerness, (enough, most_ms) in _EAGERNESS.items():
        cut = np.mean([p.score >= enough or p.lasts_ms >= most_ms for p in within])
        known_ms = [PAUSE_MS + p.took_ms if p.score >= enough else most_ms for p in ends]
        rows.append(_row(f"semantic_vad, {eagerness}", float(cut), known_ms))
    return rows


def _row(rule: str, cut: float, known_ms: list[float]) -> dict:
    p50, p90 = np.percentile(known_ms, (50, 90))
    at_once = float(np.mean([ms <= 500 for ms in known_ms]))
    return {
        "rule": rule,
        "pauses_that_end_the_turn": cut,
        "end_known_ms": {"p50": float(p50), "p90": float(p90)},
        "ends_known_within_500_ms": at_once,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clips", type=Path, nargs="+", required=True)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path = installed_model_path()
    if path is None:
        parser.error("there is no endpoint model: install pipecat-ai")
    speech, model = SileroModel(), SmartTurnModel(path)
    files = sorted(file for folder in args.clips for file in folder.glob("sp_*.flac"))
    pauses = [pause for file in files for pause in pauses_of(file, speech, model)]
    rows = table(pauses)
    n_within = sum(pause.lasts_ms is not None for pause in pauses)
    print(f"{len(files)} recordings, {n_within} pauses within, {len(pauses) - n_within} ends")
    for row in rows:
        known = row["end_known_ms"]
        print(
            f"{row['rule']:24} ends the turn in {row['pauses_that_end_the_turn']:5.0%} of pauses; "
            f"end known after P50 {known['p50']:.0f}, P90 {known['p90']:.0f} ms"
        )
    if args.json:
        document = {"benchmark": "endpoint", **facts(), "rows": rows}
        document["pauses"] = [asdict(pause) for pause in pauses]
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
