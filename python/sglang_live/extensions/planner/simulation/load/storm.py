"""What a storm is: several users who send half a minute of audio at once, again and again."""

from dataclasses import dataclass
from typing import Self

# Of the text that answers each message.
MAX_OUTPUT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class StormSpec:
    """A storm of `sessions` at once, every `period_s`, each with `clip_s` of audio."""

    sessions: int
    period_s: float
    clip_s: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse N:PERIOD_S:CLIP_S.

        Raises:
            ValueError: if the text has another form.
        """
        sessions, period_s, clip_s = text.split(":")
        spec = cls(int(sessions), float(period_s), float(clip_s))
        if spec.sessions < 1 or spec.period_s <= 0 or not 0.1 <= spec.clip_s <= 300:
            raise ValueError(f"out of range: {text}")
        return spec
