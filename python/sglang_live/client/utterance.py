"""What a microphone will pick up, as the messages that carry it: made once, spoken often.

Encoding a frame costs more than sending it, and callers of a load test speak the same clips.
"""

import base64
import json
from dataclasses import dataclass
from functools import cache
from typing import Self

from sglang_live.client import clip


def append_message(frame: bytes) -> str:
    audio = base64.b64encode(frame).decode()
    return json.dumps({"type": "input_audio_buffer.append", "audio": audio})


@cache
def silence_message(frames_per_message: int = 1) -> str:
    return append_message(bytes(clip.FRAME_BYTES * frames_per_message))


@dataclass(frozen=True, slots=True, kw_only=True)
class Utterance:
    """A recording ready to be sent.

    Attributes:
        messages: one `input_audio_buffer.append` each; all hold `frames_per_message` frames.
        onset: number of the message, counted from 1, in which the speech begins.
        end: number of the message in which it ends; TTFP counts from there.
    """

    messages: tuple[str, ...]
    frames_per_message: int
    onset: int
    end: int
    duration_s: float

    @classmethod
    def of(cls, pcm: bytes, frames_per_message: int = 1) -> Self:
        """Raises ValueError for audio without samples."""
        if not (spoken := clip.speech_frames(pcm)):
            raise ValueError("the clip holds no samples")
        per = frames_per_message
        return cls(
            messages=tuple(append_message(piece) for piece in clip.frames(pcm, per)),
            frames_per_message=per,
            onset=clip.frames_before_speech(pcm) // per + 1,
            end=-(-spoken // per),
            duration_s=clip.duration_s(pcm),
        )
