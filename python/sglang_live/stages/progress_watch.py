"""Whether a scheduler is stuck: it has work, and completes no round of it.

In: its count of rounds, from time to time. Out: whether it is stuck.
Owner: one per engine. Pure: no clock, no I/O.
"""

from dataclasses import dataclass

# Tokens of prompts in a usual round. A longer round (without chunks, or with an hour of audio to
# encode at once) has a proportionally longer limit.
ROUND_TOKENS = 8192


@dataclass(slots=True)
class ProgressWatch:
    """
    Args:
        limit_s: seconds without a completed round after which a scheduler with work is stuck.
    """

    limit_s: float
    _n_steps: float = -1
    _since_s: float = 0.0

    def look(self, now_s: float, *, has_work: bool, n_steps: float, round_tokens: int = 0) -> bool:
        """Returns True if it is stuck.

        Args:
            has_work: whether it has requests that are not done.
            n_steps: rounds so far, or another number that changes with each.
            round_tokens: tokens of all prompts in the running round.
        """
        if not has_work or n_steps != self._n_steps:
            self._n_steps = n_steps
            self._since_s = now_s
            return False
        return now_s - self._since_s > self.limit_s * max(1.0, round_tokens / ROUND_TOKENS)

    def forgive(self, now_s: float) -> None:
        """Restart the limit, because the scheduler has a reason to be slow."""
        self._since_s = now_s
