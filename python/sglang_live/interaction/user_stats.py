"""Statistics of one user, from which the stages estimate what comes next.

Owner: one UserStats per session, updated by its monitor; one UserPrior per server, updated by all
of them.
"""

from dataclasses import dataclass, field

from sglang_live.interaction.playback import PRIOR_FRAMES_PER_TOKEN

# The last three or four responses decide: a user's behaviour changes within a session.
_WEIGHT = 0.3
# A longer gap means that the user was away, not that the user is slow.
_MAX_GAP_S = 30.0
# About the last 50 responses of the server decide.
_PRIOR_WEIGHT = 0.02


@dataclass(slots=True)
class UserPrior:
    """Statistics of all users of this server: the first values of a new user.

    frames_per_token: codec frames per token of complete responses, moving average.
    """

    frames_per_token: float = PRIOR_FRAMES_PER_TOKEN
    _n_paces: int = 0

    def add_pace(self, frames_per_token: float) -> None:
        # The first ones weigh more: the constant is that of another voice and language.
        self._n_paces += 1
        weight = max(_PRIOR_WEIGHT, 1 / self._n_paces)
        self.frames_per_token += weight * (frames_per_token - self.frames_per_token)


@dataclass(slots=True)
class UserStats:
    """Moving averages of one user.

    prior: the server's averages; this user's responses count in them too.
    response_gap_s: from the end of playback to the onset of the user's speech; None before the
        first.
    """

    prior: UserPrior = field(default_factory=UserPrior)
    response_gap_s: float | None = None
    _frames_per_token: float | None = None

    @property
    def frames_per_token(self) -> float:
        """Codec frames per token of responses that were spoken to their end; the server's before
        the first."""
        if self._frames_per_token is None:
            return self.prior.frames_per_token
        return self._frames_per_token

    def add_gap(self, gap_s: float) -> None:
        """Count a gap between the end of playback and the user's next speech."""
        gap_s = min(gap_s, _MAX_GAP_S)
        known_s = gap_s if self.response_gap_s is None else self.response_gap_s
        self.response_gap_s = known_s + _WEIGHT * (gap_s - known_s)

    def add_pace(self, *, n_tokens: int, n_frames: int) -> None:
        """Count a response of n_tokens that was spoken to its end in n_frames."""
        if n_tokens > 0 and n_frames > 0:
            pace = n_frames / n_tokens
            known = self.frames_per_token
            self._frames_per_token = known + _WEIGHT * (pace - known)
            self.prior.add_pace(pace)
