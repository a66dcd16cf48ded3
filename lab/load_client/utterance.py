"""The speech of a user turn, encoded as messages once and sent often.

Encoding a frame costs more than sending it, and users of a load test speak the same clips.
"""

import base64
import json
from dataclasses import dataclass
from functools import cache
from typing import Self

import numpy as np

from sglang_live.client import clip

# Speech begins where frames exceed the room noise by this level, for the length of a phoneme.
ONSET_OVER_ROOM_DB = 10.0
ONSET_FRAMES = 3


def append_message(frame: bytes) -> str:
    audio = base64.b64encode(frame).decode()
    return json.dumps({"type": "input_audio_buffer.append", "audio": audio})


@cache
def silence_message(frames_per_message: int = 1) -> str:
    return append_message(bytes(clip.FRAME_BYTES * frames_per_message))


@dataclass(frozen=True, slots=True, kw_only=True)
class Utterance:
    """A recording as messages.

    Attributes:
        messages: one `input_audio_buffer.append` each; all hold `frames_per_message` frames.
        frames_per_message: 20 ms frames in each message.
        onset: number of the message, counted from 1, in which the speech begins.
        end: number of the message in which the speech ends; TTFP counts from its end.
    """

    messages: tuple[str, ...]
    frames_per_message: int
    onset: int
    end: int
    duration_s: float

    @classmethod
    def of(cls, pcm: bytes, frames_per_message: int = 1) -> Self:
        """Raises ValueError for audio without samples."""
        if not (n_speech := clip.speech_frames(pcm)):
            raise ValueError("the clip holds no samples")
        per = frames_per_message
        return cls(
            messages=tuple(append_message(part) for part in clip.frames(pcm, per)),
            frames_per_message=per,
            onset=frames_before_speech(pcm) // per + 1,
            end=-(-n_speech // per),
            duration_s=clip.duration_s(pcm),
        )


def frames_before_speech(pcm: bytes) -> int:
    """Number of frames before the onset of speech.

    The onset is the first of three consecutive frames within 35 dB of the loudest frame and 10 dB
    above the room noise, which is the level of the quietest tenth of the frames. If no frame is
    10 dB above it, as in a tone, frames within 10 dB of the loudest count. A clip of fewer than
    three frames begins at once.
    """
    levels = np.array(clip.frame_levels(pcm))
    if len(levels) < ONSET_FRAMES:
        return 0
    peak = levels.max()
    room = np.percentile(levels, 10, method="lower")
    over_room = min(room * clip.gain(ONSET_OVER_ROOM_DB), peak * clip.gain(-ONSET_OVER_ROOM_DB))
    is_speech = levels >= max(peak * clip.gain(-clip.SPEECH_RANGE_DB), over_room)
    lasting = np.lib.stride_tricks.sliding_window_view(is_speech, ONSET_FRAMES).all(axis=1)
    return int(lasting.argmax())
