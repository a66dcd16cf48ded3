"""How many sessions can be served in time: more while there is slack, fewer when there is none.

In: how much of their budgets the slow ones among the latest beats took. Out: a limit.
Additive increase, multiplicative decrease (Chiu and Jain 1989) as Metronome has it (section 4.2),
with longer steps until the end of the slack was seen once: by as much as is left of it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AimdConfig:
    """
    target: share of its budget that a beat may take.
    first: sessions there may be before anything was seen.
    increase: sessions more after windows with slack in which the limit was reached.
    probe: so many sessions' windows, once slack has run out before: where there are few, one more
        is much, and should not be tried all the time.
    decrease: of the sessions that were too many.
    """

    target: float = 1.0
    first: int = 16
    increase: int = 1
    probe: int = 20
    decrease: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.target < float("inf"):
            raise ValueError(f"target must be positive, got {self.target}")
        if min(self.first, self.increase, self.probe) < 1:
            raise ValueError("first, increase and probe must be at least 1")
        if not 0 < self.decrease < 1:
            raise ValueError(f"decrease is a share below 1, got {self.decrease}")


class Aimd:
    """
    Attributes:
        limit: sessions there may be; at least 1.
        found: slack has run out before, so that the limit is near what can be served.
    """

    def __init__(self, config: AimdConfig | None = None):
        self._config = config or AimdConfig()
        self.limit, self.found = self._config.first, False
        self._calm = 0  # sessions' windows with slack at the limit

    def window(self, share: float | None, n_sessions: int) -> None:
        """A window is over. share: None if nothing was due in it."""
        if share is not None and share > self._config.target:
            # Nobody is hung up on, so what more than the limit cannot do says nothing about it.
            # And one caller alone does not wait for others.
            if 1 < n_sessions <= self.limit:
                self.limit = max(1, int(n_sessions * self._config.decrease))
                self.found, self._calm = True, 0
        elif n_sessions >= self.limit:
            self.limit += self._step(share, n_sessions)

    def _step(self, share: float | None, n_sessions: int) -> int:
        if self.found:
            self._calm += n_sessions
            if self._calm < self._config.probe:
                return 0
            self._calm = 0
        if self.found or share is None:
            return self._config.increase
        # Half of what would use it up if lateness grew in proportion to the load: it grows faster.
        slack = 1 - share / self._config.target
        return max(self._config.increase, int(self.limit * slack / 2))
