"""What is to be expected of one caller, from what was seen so far.

Owner: one Habits per session, updated by its monitor.
"""

from dataclasses import dataclass

from sglang_live.interaction.heard import PRIOR_FRAMES_PER_TOKEN

# A handful of answers decides: people change their ways within a call.
_WEIGHT = 0.3


@dataclass(slots=True)
class Habits:
    """Moving averages.

    interrupts: share of audible answers that were interrupted, 0 to 1.
    reply_gap_s: from the end of playback to the caller's next word; None before the first.
    frames_per_token: pace of replies that were spoken to their end.
    """

    interrupts: float = 0.0
    reply_gap_s: float | None = None
    frames_per_token: float = PRIOR_FRAMES_PER_TOKEN

    def answer_ended(self, *, interrupted: bool) -> None:
        self.interrupts += _WEIGHT * (float(interrupted) - self.interrupts)

    def replied_after(self, gap_s: float) -> None:
        known_s = gap_s if self.reply_gap_s is None else self.reply_gap_s
        self.reply_gap_s = known_s + _WEIGHT * (gap_s - known_s)

    def spoke(self, *, n_tokens: int, n_frames: int) -> None:
        """A reply of n_tokens was spoken to its end in n_frames."""
        if n_tokens > 0 and n_frames > 0:
            self.frames_per_token += _WEIGHT * (n_frames / n_tokens - self.frames_per_token)
