"""Whether a clip holds speech, and where: what holds none is not written down or answered.

In: a whole clip. Out: the stretches of it that hold speech.
A model that is asked for the words of silence makes some up. Quiet speech is speech: the clip is
brought to a usual level first, unless even its loudest part is the noise of 16 bits.
"""

from collections.abc import Iterator

import numpy as np

from sglang_live.interaction.silero import SpeechModel
from sglang_live.interaction.vad import (
    SAMPLES_PER_MS,
    SpeechDetector,
    SpeechStarted,
    SpeechStopped,
    VadSettings,
)

# Words fade in and out; the model hears them better with the room around them.
_PADDING_MS = 300
_SETTINGS = VadSettings(prefix_padding_ms=_PADDING_MS, silence_duration_ms=_PADDING_MS)
# Pauses up to this belong to speech; so does silence at both ends.
_MAX_PAUSE_SAMPLES = 1500 * SAMPLES_PER_MS
# RMS of a usual recording, and the level below which there is only the noise of 16 bits.
_USUAL_LEVEL = 2000.0
_MIN_LEVEL = 2.0
_FRAME_SAMPLES = 20 * SAMPLES_PER_MS
# A click is as loud as it likes, but has no more frames than this.
_CLICK_FRAMES = 2
_PIECE_SAMPLES = 2000 * SAMPLES_PER_MS

Stretch = tuple[int, int]


def has_speech(pcm: np.ndarray, model: SpeechModel) -> bool:
    """Whether there is any; looks no further than the first. pcm: [n] int16, 16 kHz."""
    return next(_found(pcm, model), None) is not None


def speech_only(pcm: np.ndarray, model: SpeechModel) -> np.ndarray:
    """The clip without its long silences; the same array if it has none, empty without speech."""
    kept: list[Stretch] = []
    for begin, end in _found(pcm, model):
        if kept and begin - kept[-1][1] <= _MAX_PAUSE_SAMPLES:
            begin, _ = kept.pop()
        kept.append((begin, end))
    if not kept:
        return pcm[:0]
    if kept[0][0] <= _MAX_PAUSE_SAMPLES:
        kept[0] = 0, kept[0][1]
    if len(pcm) - kept[-1][1] <= _MAX_PAUSE_SAMPLES:
        kept[-1] = kept[-1][0], len(pcm)
    if kept == [(0, len(pcm))]:
        return pcm
    return np.concatenate([pcm[begin:end] for begin, end in kept])


def _found(pcm: np.ndarray, model: SpeechModel) -> Iterator[Stretch]:
    """Ascending, in samples; the last may end where the clip does."""
    level = _level(pcm)
    if level < _MIN_LEVEL:
        return
    gain = max(1.0, _USUAL_LEVEL / level)
    detector, begin = SpeechDetector(model, _SETTINGS), None
    for start in range(0, len(pcm) + _PIECE_SAMPLES, _PIECE_SAMPLES):
        # Silence behind the clip completes its last window, and its last stretch.
        piece = np.zeros(_PIECE_SAMPLES, np.int16)
        loud = pcm[start : start + _PIECE_SAMPLES] * np.float32(gain)
        piece[: len(loud)] = np.clip(loud, -32768, 32767)
        for event in detector.feed(piece):
            if isinstance(event, SpeechStarted):
                begin = event.at_ms * SAMPLES_PER_MS
            elif isinstance(event, SpeechStopped) and begin is not None:
                yield begin, min(event.at_ms * SAMPLES_PER_MS, len(pcm))


def _level(pcm: np.ndarray) -> float:
    """RMS of the loudest frame but for clicks, without what is constant."""
    n_frames = max(1, len(pcm) // _FRAME_SAMPLES)
    frames = [part.astype(np.float32) for part in np.array_split(pcm, n_frames) if len(part)]
    levels = sorted((float(part.std()) for part in frames), reverse=True)
    return levels[min(_CLICK_FRAMES, len(levels) - 1)] if levels else 0.0
