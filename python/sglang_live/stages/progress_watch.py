"""Whether a scheduler is stuck: it has work, and completes no round of it.

In: what it has done so far, looked at now and then. Out: for how long it has done nothing.
Owner: one per engine. Pure: no clock, no I/O.
"""

from dataclasses import dataclass

# So many tokens of prompts are one round's usual work; longer ones (without chunks, or with an hour
# of audio to encode at once) are given the limit as many times over.
ROUND_TOKENS = 8192


@dataclass(slots=True)
class ProgressWatch:
    """
    Args:
        limit_s: without a completed round, from which a scheduler with work is stuck.
    """

    limit_s: float
    _n_steps: float = -1
    _since_s: float = 0.0

    def look(self, now_s: float, *, has_work: bool, n_steps: float, round_tokens: int = 0) -> bool:
        """Returns True if it is stuck.

        Args:
            has_work: requests were given to it and are not answered.
            n_steps: rounds so far, or anything else that changes with each.
            round_tokens: length of all prompts in the round that is under way.
        """
        if not has_work or n_steps != self._n_steps:
            self._n_steps, self._since_s = n_steps, now_s
            return False
        return now_s - self._since_s > self.limit_s * max(1.0, round_tokens / ROUND_TOKENS)

    def forgive(self, now_s: float) -> None:
        """It has a reason; begin anew."""
        self._since_s = now_s
