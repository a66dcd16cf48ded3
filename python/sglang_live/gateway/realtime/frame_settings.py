"""Settings of frame mode: audio in frames of fixed length, without turns.

It is the `turn_detection` type "frames". In: TurnDetectionForm. Out: FrameSettings.
"""

from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from sglang_live.gateway.realtime.events import TurnDetectionForm

KIND = "frames"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSettings:
    """
    frame_ms: length of a frame of the user's audio, a multiple of 80 ms (one token of the audio
        encoder).
    max_tokens: text tokens after each frame.
    """

    frame_ms: int = 480
    max_tokens: int = 4

    @property
    def frame_s(self) -> float:
        return self.frame_ms / 1000

    def to_json(self) -> dict[str, Any]:
        return {"type": KIND, "frame_ms": self.frame_ms, "max_tokens": self.max_tokens}


def merge_frame_mode(
    form: TurnDetectionForm | None, current: FrameSettings | None
) -> FrameSettings | None:
    """Apply a form: absent keys keep their value, null ones return to the default.

    Returns:
        None if the form sets another turn detection.
    """
    if form is None or (form.type in (UNSET, None) and current is None):
        return None
    if form.type not in (UNSET, None, KIND):
        return None
    current, default = current or FrameSettings(), FrameSettings()
    values: dict[str, int] = {}
    for name in ("frame_ms", "max_tokens"):
        sent = getattr(form, name)
        kept = getattr(current, name) if sent is UNSET else sent
        values[name] = getattr(default, name) if kept is None else kept
    return FrameSettings(**values)
