"""When the KV of an idle session will be needed again: T_next = T_play + T_reply.

In: when playback ends, how long callers take to reply. Out: the time that kv/victim_index.py
ranks by. LiveServe (arXiv 2606.22983) eq. 4; here it is a point in time, so it stays as it is
while time passes. Owner: one NextUse per engine rank.
"""

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NextUseConfig:
    """T_reply is a gap and then an utterance: KV is needed when what was said is complete.

    Talk between people, AMI corpus, meeting ES2014c, by speaker changes and stretches of speech:
        first_gap_s: what the gap of the workload is taken for before any was seen: the median
            of the 203 changes without overlap (their mean is 0.65 s).
        utterance_s: the median of 801 stretches. The same for everybody, so it moves nobody
            among known sessions; it ranks all of them against KV whose next use is unknown.

    gap_weight: of one gap in the workload's moving average: the last 50 or so count. A caller's
        own average, where there is one, goes first anyway.
    max_gap_s: longer ones count as this. Who went for coffee must not move the average far.
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
        workload_gap_s: from the end of playback to the caller's next word, over all sessions.
    """

    def __init__(self, config: NextUseConfig | None = None) -> None:
        self._config = config or NextUseConfig()
        self.workload_gap_s = self._config.first_gap_s
        self._sessions: dict[Hashable, _Session] = {}

    def plays_until(self, session: Hashable, at_s: float | None) -> None:
        """at_s: when the listener will have heard what there is so far. None: nobody knows.

        After a barge-in it is the time of the barge-in. While a reply is still being made, its
        end is unknown and at_s a lower bound; a stage that is done with the reply before the
        others knows better, and should say when all of it will have been heard.
        """
        self._session(session).playing_until_s = at_s

    def replies_after(self, session: Hashable, gap_s: float | None) -> None:
        """This caller's own average gap. None before the first."""
        self._session(session).gap_s = gap_s

    def saw_gap(self, gap_s: float) -> None:
        """Somebody replied so long after the end of playback. Interruptions are no replies."""
        config = self._config
        capped_s = min(max(gap_s, 0.0), config.max_gap_s)
        self.workload_gap_s += config.gap_weight * (capped_s - self.workload_gap_s)

    def forget(self, session: Hashable) -> None:
        self._sessions.pop(session, None)

    def expected(self, session: Hashable) -> float | None:
        """In seconds on the clock of plays_until(). None: not known, rank by LRU.

        It passes while the caller stays silent; what that means is up to the reader.
        """
        known = self._sessions.get(session)
        if known is None or known.playing_until_s is None:
            return None
        gap_s = self.workload_gap_s if known.gap_s is None else known.gap_s
        return known.playing_until_s + gap_s + self._config.utterance_s

    def _session(self, session: Hashable) -> _Session:
        return self._sessions.setdefault(session, _Session())
