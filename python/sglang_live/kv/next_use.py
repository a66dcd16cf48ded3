"""Estimated next use of an idle session's KV: T_next = T_play + T_reply.

In: end of playback, users' gaps before they speak. Out: the time by which kv/victim_index.py ranks.
LiveServe (arXiv 2606.22983) eq. 4; here it is a point in time, which does not change while time
passes. Owner: one NextUse per engine rank.
"""

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NextUseConfig:
    """T_reply is a gap and then an utterance, because KV is needed at the end of the utterance.

    Speech between people, AMI corpus, meeting ES2014c, by speaker changes and stretches of speech:
        first_gap_s: gap of the workload before one is measured: the median of the 203 changes
            without overlap (their mean is 0.65 s).
        utterance_s: the median of 801 stretches. It is the same for all sessions, so it does not
            change the order among known ones; it ranks them against KV of unknown next use.

    gap_weight: weight of one gap in the workload's moving average: about the latest 50 count. A
        user's own average, where there is one, has priority.
    max_gap_s: longer gaps count as this: one long absence must not move the average far.
    """

    first_gap_s: float = 0.38
    utterance_s: float = 1.57
    gap_weight: float = 0.02
    max_gap_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.gap_weight <= 1:
            raise ValueError(f"gap_weight must be above 0, at most 1, got {self.gap_weight}")
        for name in ("first_gap_s", "utterance_s", "max_gap_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


@dataclass(slots=True)
class _Session:
    playing_until_s: float | None = None
    gap_s: float | None = None


class NextUse:
    """
    Attributes:
        workload_gap_s: mean time from the end of playback to the user's next word, over all
            sessions.
    """

    def __init__(self, config: NextUseConfig | None = None) -> None:
        self._config = config or NextUseConfig()
        self.workload_gap_s = self._config.first_gap_s
        self._sessions: dict[Hashable, _Session] = {}

    def plays_until(self, session: Hashable, at_s: float | None) -> None:
        """Set the time at which the listener will have heard all audio that exists; None: unknown.

        After a barge-in it is the time of the barge-in. While a response is in progress, its end
        is unknown and at_s is a lower bound; a stage that has finished the response before the
        others has a better estimate, and passes the time at which all of it will have been heard.
        """
        self._session(session).playing_until_s = at_s

    def set_user_gap(self, session: Hashable, gap_s: float | None) -> None:
        """Set this user's own mean gap; None before the first."""
        self._session(session).gap_s = gap_s

    def observe_gap(self, gap_s: float) -> None:
        """Record the gap between the end of playback and a user's speech, other than a barge-in."""
        config = self._config
        capped_s = min(max(gap_s, 0.0), config.max_gap_s)
        self.workload_gap_s += config.gap_weight * (capped_s - self.workload_gap_s)

    def forget(self, session: Hashable) -> None:
        self._sessions.pop(session, None)

    def expected(self, session: Hashable) -> float | None:
        """Returns the next use on the clock of plays_until(); None: unknown, rank by LRU.

        It is in the past where the user has been silent for longer than expected.
        """
        known = self._sessions.get(session)
        if known is None or known.playing_until_s is None:
            return None
        gap_s = self.workload_gap_s if known.gap_s is None else known.gap_s
        return known.playing_until_s + gap_s + self._config.utterance_s

    def _session(self, session: Hashable) -> _Session:
        return self._sessions.setdefault(session, _Session())
