"""Statistics of one user, from which the stages estimate what comes next.

Owner: one UserStats per session, updated by its monitor; one UserPrior per server, updated by all
of them.
"""

from dataclasses import dataclass, field

from sglang_live.interaction.audio_alignment import PRIOR_FRAMES_PER_TOKEN
from sglang_live.policy.view import FIRST_INTERRUPTS

# The last three or four responses decide: a user's behaviour changes within a session.
_WEIGHT = 0.3
# A longer gap means that the user was away, not that the user is slow.
_MAX_GAP_S = 30.0
# About the last 50 responses of the server decide.
_PRIOR_WEIGHT = 0.02


@dataclass(slots=True)
class UserPrior:
    """Statistics of all users of this server: the first values of a new user.

    interrupts: share of audible responses that were interrupted, moving average, 0 to 1.
    """

    interrupts: float = FIRST_INTERRUPTS

    def add_response(self, *, interrupted: bool) -> None:
        self.interrupts += _PRIOR_WEIGHT * (float(interrupted) - self.interrupts)


@dataclass(slots=True)
class UserStats:
    """Moving averages of one user.

    prior: the server's averages; this user's responses count in them too.
    interrupts: share of audible responses that were interrupted, 0 to 1.
    response_gap_s: from the end of playback to the onset of the user's speech; None before the
        first.
    frames_per_token: codec frames per token of responses that were spoken to their end.
    """

    prior: UserPrior = field(default_factory=UserPrior)
    interrupts: float = field(init=False)
    response_gap_s: float | None = None
    frames_per_token: float = PRIOR_FRAMES_PER_TOKEN

    def __post_init__(self) -> None:
        self.interrupts = self.prior.interrupts

    def add_response(self, *, interrupted: bool) -> None:
        """Count a response that was audible and is over."""
        self.prior.add_response(interrupted=interrupted)
        self.interrupts += _WEIGHT * (float(interrupted) - self.interrupts)

    def add_gap(self, gap_s: float) -> None:
        """Count a gap between the end of playback and the user's next speech."""
        gap_s = min(gap_s, _MAX_GAP_S)
        known_s = gap_s if self.response_gap_s is None else self.response_gap_s
        self.response_gap_s = known_s + _WEIGHT * (gap_s - known_s)

    def add_pace(self, *, n_tokens: int, n_frames: int) -> None:
        """Count a response of n_tokens that was spoken to its end in n_frames."""
        if n_tokens > 0 and n_frames > 0:
            self.frames_per_token += _WEIGHT * (n_frames / n_tokens - self.frames_per_token)
