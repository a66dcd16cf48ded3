"""Speech in a whole clip: a clip without speech is neither transcribed nor responded to.

In: a whole clip. Out: its stretches of speech.
A model invents words for silence. The clip is amplified to a usual level first, so that quiet
speech counts, unless even its loudest part is within the noise of 16 bits.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from sglang_live.interaction.silero import SpeechModel
from sglang_live.interaction.vad import (
    SAMPLES_PER_MS,
    SpeechDetector,
    SpeechStarted,
    SpeechStopped,
    VadSettings,
)

# Words fade in and out; transcripts are better with some audio around them.
_PADDING_MS = 300
_SETTINGS = VadSettings(prefix_padding_ms=_PADDING_MS, silence_duration_ms=_PADDING_MS)
# Pauses up to this belong to speech; so does silence at both ends.
_MAX_PAUSE_SAMPLES = 1500 * SAMPLES_PER_MS
# RMS of a usual recording, and the RMS below which there is only the noise of 16 bits.
_USUAL_LEVEL = 2000.0
_MIN_LEVEL = 2.0
_FRAME_SAMPLES = 20 * SAMPLES_PER_MS
# A click can be loud, but spans no more frames than this.
_CLICK_FRAMES = 2
_CHUNK_SAMPLES = 2000 * SAMPLES_PER_MS

Stretch = tuple[int, int]


def has_speech(pcm: np.ndarray, model: SpeechModel) -> bool:
    """Whether there is speech; stops at the first. pcm: [n] int16, 16 kHz."""
    return next(_stretches(pcm, model), None) is not None


def speech_only(pcm: np.ndarray, model: SpeechModel) -> np.ndarray:
    """Return the clip without long silences: the same array without any, empty without speech."""
    kept: list[Stretch] = []
    for start, end in _stretches(pcm, model):
        if kept and start - kept[-1][1] <= _MAX_PAUSE_SAMPLES:
            start, _ = kept.pop()
        kept.append((start, end))
    if not kept:
        return pcm[:0]
    if kept[0][0] <= _MAX_PAUSE_SAMPLES:
        kept[0] = 0, kept[0][1]
    if len(pcm) - kept[-1][1] <= _MAX_PAUSE_SAMPLES:
        kept[-1] = kept[-1][0], len(pcm)
    if kept == [(0, len(pcm))]:
        return pcm
    return np.concatenate([pcm[start:end] for start, end in kept])


def utterances(pcm: np.ndarray, model: SpeechModel) -> list[np.ndarray]:
    """Return the clip's stretches of speech, each with the silence around it; [] without speech."""
    spoken = stretches(pcm, model)
    cuts = [(end + start) // 2 for (_, end), (start, _) in pairwise(spoken)]
    bounds = [0, *cuts, len(pcm)] if spoken else []
    return [speech_only(pcm[begin:end], model) for begin, end in pairwise(bounds)]


def stretches(pcm: np.ndarray, model: SpeechModel) -> list[Stretch]:
    """Return where the clip's stretches of speech begin and end, in samples."""
    return list(_stretches(pcm, model))


def _stretches(pcm: np.ndarray, model: SpeechModel) -> Iterator[Stretch]:
    """Yield stretches of speech in samples, ascending; the last may end with the clip."""
    level = _level(pcm)
    if level < _MIN_LEVEL:
        return
    gain = max(1.0, _USUAL_LEVEL / level)
    detector, start = SpeechDetector(model, _SETTINGS), None
    for at in range(0, len(pcm) + _CHUNK_SAMPLES, _CHUNK_SAMPLES):
        # Silence after the clip completes its last window and its last stretch.
        chunk = np.zeros(_CHUNK_SAMPLES, np.int16)
        loud = pcm[at : at + _CHUNK_SAMPLES] * np.float32(gain)
        chunk[: len(loud)] = np.clip(loud, -32768, 32767)
        for event in detector.feed(chunk):
            if isinstance(event, SpeechStarted):
                start = event.at_ms * SAMPLES_PER_MS
            elif isinstance(event, SpeechStopped) and start is not None:
                yield start, min(event.at_ms * SAMPLES_PER_MS, len(pcm))


def _level(pcm: np.ndarray) -> float:
    """RMS of the loudest frame that is not a click, without any constant offset."""
    n_frames = max(1, len(pcm) // _FRAME_SAMPLES)
    frames = [part.astype(np.float32) for part in np.array_split(pcm, n_frames) if len(part)]
    levels = sorted((float(part.std()) for part in frames), reverse=True)
    return levels[min(_CLICK_FRAMES, len(levels) - 1)] if levels else 0.0
