"""What is to be expected of one caller, from what was seen so far.

Owner: one UserStats per session, updated by its monitor; what they have in common is learned once
per server.
"""

from dataclasses import dataclass, field

from sglang_live.interaction.audio_alignment import PRIOR_FRAMES_PER_TOKEN
from sglang_live.policy.view import FIRST_INTERRUPTS

# A handful of answers decides: people change their ways within a call.
_WEIGHT = 0.3
# Who went for coffee is not slow to reply.
_MAX_GAP_S = 30.0
# Of one answer among those of all callers: the last 50 or so count.
_WEIGHT_OF_ALL = 0.02


@dataclass(slots=True)
class UserStats:
    """All callers of this server: what to expect of one who has just come.

    interrupts: share of audible answers that were interrupted, moving average, 0 to 1.
    """

    interrupts: float = FIRST_INTERRUPTS

    def answer_ended(self, *, interrupted: bool) -> None:
        self.interrupts += _WEIGHT_OF_ALL * (float(interrupted) - self.interrupts)


@dataclass(slots=True)
class UserStats:
    """Moving averages.

    callers: whom this one is taken for at first.
    interrupts: share of audible answers that were interrupted, 0 to 1.
    response_gap_s: from the end of playback to the caller's next word; None before the first.
    frames_per_token: pace of replies that were spoken to their end.
    """

    user_stats: UserStats = field(default_factory=UserStats)
    interrupts: float = field(init=False)
    response_gap_s: float | None = None
    frames_per_token: float = PRIOR_FRAMES_PER_TOKEN

    def __post_init__(self) -> None:
        self.interrupts = self.user_stats.interrupts

    def answer_ended(self, *, interrupted: bool) -> None:
        self.user_stats.answer_ended(interrupted=interrupted)
        self.interrupts += _WEIGHT * (float(interrupted) - self.interrupts)

    def replied_after(self, gap_s: float) -> None:
        gap_s = min(gap_s, _MAX_GAP_S)
        known_s = gap_s if self.response_gap_s is None else self.response_gap_s
        self.response_gap_s = known_s + _WEIGHT * (gap_s - known_s)

    def spoke(self, *, n_tokens: int, n_frames: int) -> None:
        """A reply of n_tokens was spoken to its end in n_frames."""
        if n_tokens > 0 and n_frames > 0:
            self.frames_per_token += _WEIGHT * (n_frames / n_tokens - self.frames_per_token)
