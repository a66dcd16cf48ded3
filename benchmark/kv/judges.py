"""Replay of a schedule of accesses against a KV pool: evictions and reloads of a policy.

All KV is in the pool or out of it, in pages, and is evicted from the tail of a session only. A
request reloads the missing pages of its session and takes room for its own tokens at once; its
session is pinned until it ends. The policy chooses the sessions whose pages make room. Times are
those of the schedule: a reload on a request's path is counted and delays nothing.

`Belady` reloads the fewest pages possible, of all policies with or without the future, with or
without preload. All pages of a session are next needed at the same moment. So a page that is kept
from the end of one request to the beginning of the session's next is an interval, a page that is
not kept is one reload, and the number of open intervals is limited by the room that pinned sessions
leave. If there are too many, dropping those that end last keeps the most. This is exact in pages:
hence in tokens if a page has one token, and otherwise up to the unfilled part of each session's
last page. Replayed with preload it is not optimal: early loads take room from others. Nor does it
minimise misses: for that, large sessions would be dropped before small ones.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmark.kv.workload import Access, Schedule, pages

# An eviction followed by a reload within this time is a cycle. Chosen for this benchmark.
CYCLE_S = 10.0
_GENERATED, _SPOKEN, _CLOSED, _SPEECH, _REQUEST = range(5)  # order of events at equal times
# The talker is ahead of playback by this much, where policies pace it.
BUFFERED_S = 2.0


@dataclass(frozen=True, slots=True)
class IdleFacts:
    """What is known when a request has ended.

    playback_end_s: end of the response's playback; None if unknown.
    began_s: begin of its playback. output_tokens: of its text, which is complete now.
    """

    playback_end_s: float | None
    began_s: float = 0.0
    output_tokens: int = 0


class Policy:
    """Chooses the sessions whose KV is evicted. Methods other than `victim` report events."""

    def speaks(self, session: int, now_s: float) -> None:
        """Its user begins to speak."""

    def accessed(self, session: int, now_s: float) -> None:
        """Its request comes."""

    def idle(self, session: int, now_s: float, facts: IdleFacts) -> None:
        """Its request has ended."""

    def spoken(self, session: int, now_s: float, playback_end_s: float) -> None:
        """The talker has ended its response: the end of playback is known."""

    def closed(self, session: int) -> None:
        """It will not be used again."""

    def victim(self, candidates: Sequence[int], now_s: float) -> int:
        raise NotImplementedError


class Lru(Policy):
    """Evicts the least recently used session, as SGLang does.

    speech_is_use: whether the start of speech is a use: with preload, which looks up the cache.
    """

    def __init__(self, *, speech_is_use: bool = False):
        self._speech_is_use = speech_is_use
        self._used_s: dict[int, float] = {}

    def speaks(self, session: int, now_s: float) -> None:
        if self._speech_is_use:
            self._used_s[session] = now_s

    def accessed(self, session: int, now_s: float) -> None:
        self._used_s[session] = now_s

    def idle(self, session: int, now_s: float, facts: IdleFacts) -> None:
        self._used_s[session] = now_s

    def victim(self, candidates: Sequence[int], now_s: float) -> int:
        return min(candidates, key=self._used_s.__getitem__)


class NextUseHint(Policy):
    """Evicts the session whose next use is expected farthest from now (LiveServe §5.1).

    The end of playback is known here as soon as the request has ended, which no server can know;
    gateway.py has what a server knows. The next use is expected at the end of playback, plus a
    moving average of the time that this user then took to finish speaking. A session that is long
    overdue counts as distant, because its user has probably left. A session whose user speaks is
    evicted only if no other is left.
    """

    def __init__(self, prior_gap_s: float, weight: float = 0.3):
        self._prior_gap_s, self._weight = prior_gap_s, weight
        self._gap_s: dict[int, float] = {}
        self._playback_end_s: dict[int, float] = {}
        self._next_use_s: dict[int, float] = {}
        self._speaking: set[int] = set()

    def speaks(self, session: int, now_s: float) -> None:
        self._speaking.add(session)

    def accessed(self, session: int, now_s: float) -> None:
        self._speaking.discard(session)
        ended_s = self._playback_end_s.pop(session, None)
        if ended_s is not None:
            expected_s = self._gap_s.get(session, self._prior_gap_s)
            self._gap_s[session] = expected_s + self._weight * (now_s - ended_s - expected_s)

    def idle(self, session: int, now_s: float, facts: IdleFacts) -> None:
        self._next_use_s[session] = now_s  # next use unknown: ranked by age
        if facts.playback_end_s is not None:
            self._playback_end_s[session] = facts.playback_end_s
            gap_s = self._gap_s.get(session, self._prior_gap_s)
            self._next_use_s[session] = facts.playback_end_s + gap_s

    def victim(self, candidates: Sequence[int], now_s: float) -> int:
        def rank(session: int) -> tuple[bool, float]:
            return session not in self._speaking, abs(self._next_use_s[session] - now_s)

        return max(candidates, key=rank)


class Belady(Policy):
    """Evicts the session whose next access is farthest, from the schedule.

    knows_end: whether ends of sessions are known. If not, every turn is followed by another after
        the drawn gap: the end of a session is unknowable while a response plays.
    """

    def __init__(self, schedule: Schedule, *, knows_end: bool = True):
        self._due_s: dict[int, list[float]] = defaultdict(list)
        for access in reversed(schedule.accesses):
            if access.last and not knows_end:
                utterance_s = access.request_s - access.speech_s
                again_s = access.playback_end_s + access.next_gap_s + utterance_s
                self._due_s[access.session].append(again_s)
            self._due_s[access.session].append(access.request_s)

    def accessed(self, session: int, now_s: float) -> None:
        self._due_s[session].pop()

    def victim(self, candidates: Sequence[int], now_s: float) -> int:
        return max(candidates, key=self._next)

    def _next(self, session: int) -> tuple[float, int]:
        due_s = self._due_s[session]
        # Of two sessions due at the same time, the replay serves the lower number first.
        return due_s[-1] if due_s else math.inf, session


@dataclass(frozen=True, slots=True)
class Link:
    """The link from host memory to the pool, one transfer at a time."""

    tokens_per_s: float
    latency_s: float

    def took_s(self, n_tokens: int) -> float:
        return self.latency_s + n_tokens / self.tokens_per_s if n_tokens else 0.0


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Counts of one replay.

    Attributes:
        reuses: accesses after a session's first.
        misses: reuses that needed a reload, early or late.
        lost_tokens: evicted tokens of sessions that closed without needing them again.
        cycles: reloads, one per session and time, of KV evicted at most CYCLE_S before.
        hidden_tokens: reloaded tokens that were in the pool when the user had finished speaking.
        path_s: sum of the times that requests waited for the other reloaded tokens.
        overdrawn: accesses at which pinned sessions alone exceeded the pool.
    """

    reuses: int = 0
    misses: int = 0
    reloaded_pages: int = 0
    reloaded_tokens: int = 0
    evicted_tokens: int = 0
    lost_tokens: int = 0
    cycles: int = 0
    hidden_tokens: int = 0
    path_s: float = 0.0
    overdrawn: int = 0

    @property
    def hidden_share(self) -> float | None:
        return self.hidden_tokens / self.reloaded_tokens if self.reloaded_tokens else None


@dataclass(slots=True)
class _Session:
    """KV of one session: its first n_resident pages are in the pool.

    out: [(evicted_at_s, n_pages)] of the evicted pages, tail first.
    early_tokens: tokens preloaded since early_start_s, the start of speech.
    """

    n_tokens: int = 0
    n_resident: int = 0
    out: list[tuple[float, int]] = field(default_factory=list)
    pinned: bool = False
    speaking: bool = False
    missed: bool = False
    early_tokens: int = 0
    early_start_s: float = 0.0
    early_end_s: float = 0.0


def replay(
    schedule: Schedule,
    pool_tokens: int,
    policy: Policy,
    *,
    page_tokens: int = 16,
    link: Link | None = None,
    preload: bool = False,
) -> Outcome:
    """Replay a schedule.

    Args:
        pool_tokens: size of the pool, for idle and running sessions.
        link: transfers reloads. None: reloads take no time.
        preload: whether sessions are loaded, within the free room, when their user begins to speak.
    Raises:
        ValueError: if the pool is no whole number of pages, or a page has no tokens.
    """
    if page_tokens < 1 or pool_tokens % page_tokens:
        raise ValueError(f"{pool_tokens} tokens are not whole pages of {page_tokens}")
    pool = _Pool(pool_tokens // page_tokens, page_tokens, policy, link or Link(math.inf, 0.0))
    for now_s, kind, _, access in sorted(_events(schedule), key=lambda event: event[:3]):
        if kind == _REQUEST:
            pool.request(access, now_s)
        elif kind == _GENERATED:
            pool.generated(access, now_s)
        elif kind == _SPOKEN:
            policy.spoken(access.session, now_s, access.playback_end_s)
        elif kind == _CLOSED:
            pool.close(access.session)
        elif access.turn:
            pool.speech(access.session, now_s, preload=preload)
    return pool.outcome


def _events(schedule: Schedule) -> list[tuple[float, int, int, Access]]:
    events = []
    for access in schedule.accesses:
        events.append((access.speech_s, _SPEECH, access.session, access))
        events.append((access.request_s, _REQUEST, access.session, access))
        events.append((access.generated_s, _GENERATED, access.session, access))
        spoken_s = max(access.generated_s, access.playback_end_s - BUFFERED_S)
        events.append((spoken_s, _SPOKEN, access.session, access))
        if access.last:
            events.append((access.playback_end_s, _CLOSED, access.session, access))
    return events


class _Pool:
    def __init__(self, n_pages: int, page_tokens: int, policy: Policy, link: Link):
        self.outcome = Outcome()
        self._free, self._page_tokens = n_pages, page_tokens
        self._policy, self._link = policy, link
        self._link_free_s = 0.0
        self._sessions: dict[int, _Session] = {}

    def speech(self, session: int, now_s: float, *, preload: bool) -> None:
        kv = self._sessions[session]
        kv.speaking = True
        self._policy.speaks(session, now_s)
        missing = sum(n for _, n in kv.out)
        if not (preload and missing):
            return
        # Best effort: sessions of other speaking users are not evicted for it.
        room = self._make_room(missing, now_s, spare_speakers=True)
        kv.early_tokens = self._reload(kv, min(room, missing), now_s)
        kv.early_start_s, kv.early_end_s = self._transfer(kv.early_tokens, now_s)

    def request(self, access: Access, now_s: float) -> None:
        kv = self._sessions.setdefault(access.session, _Session())
        self._policy.accessed(access.session, now_s)
        kv.pinned, kv.speaking = True, False
        missing = sum(n for _, n in kv.out)
        grown = pages(access.kv_tokens, self._page_tokens) - kv.n_resident - missing
        if self._make_room(missing + grown, now_s) < missing + grown:
            self.outcome.overdrawn += 1
        self._load(kv, missing, now_s)
        self.outcome.reuses += access.turn > 0
        self.outcome.misses += kv.missed
        kv.missed = False
        kv.n_tokens = access.kv_tokens
        kv.n_resident += grown
        self._free -= grown

    def generated(self, access: Access, now_s: float) -> None:
        self._sessions[access.session].pinned = False
        facts = IdleFacts(access.playback_end_s, access.request_s, access.output_tokens)
        self._policy.idle(access.session, now_s, facts)
        self._make_room(0, now_s)  # only an overdrawn pool evicts here

    def close(self, session: int) -> None:
        kv = self._sessions.pop(session)
        self._policy.closed(session)
        self._free += kv.n_resident
        self.outcome.lost_tokens += kv.n_tokens - self._tokens(kv, kv.n_resident)

    def _load(self, kv: _Session, missing: int, now_s: float) -> None:
        """Load the missing pages on the request's path, after transfers under way."""
        arrived = kv.early_tokens
        if now_s < kv.early_end_s:
            under_way_s = max(0.0, now_s - kv.early_start_s - self._link.latency_s)
            arrived = min(arrived, int(under_way_s * self._link.tokens_per_s))
        self.outcome.hidden_tokens += arrived
        late = self._reload(kv, missing, now_s)
        end_s = kv.early_end_s if kv.early_tokens else now_s
        if late:
            _, end_s = self._transfer(late, now_s)
        self.outcome.path_s += max(0.0, end_s - now_s)
        kv.early_tokens, kv.early_end_s = 0, 0.0

    def _transfer(self, n_tokens: int, now_s: float) -> tuple[float, float]:
        start_s = max(now_s, self._link_free_s)
        self._link_free_s = start_s + self._link.took_s(n_tokens)
        return start_s, self._link_free_s

    def _make_room(self, n_pages: int, now_s: float, *, spare_speakers: bool = False) -> int:
        """Evict until n_pages are free or no victim is left. Returns the number of free pages."""
        while self._free < n_pages:
            candidates = [
                session
                for session, kv in self._sessions.items()
                if kv.n_resident and not kv.pinned and not (spare_speakers and kv.speaking)
            ]
            if not candidates:
                break
            kv = self._sessions[self._policy.victim(candidates, now_s)]
            self._evict(kv, min(kv.n_resident, n_pages - self._free), now_s)
        return self._free

    def _evict(self, kv: _Session, n_pages: int, now_s: float) -> None:
        n_tokens = self._tokens(kv, kv.n_resident)
        kv.n_resident -= n_pages
        self._free += n_pages
        n_tokens -= self._tokens(kv, kv.n_resident)
        self.outcome.evicted_tokens += n_tokens
        # The tail is evicted first and was loaded last: its preload was wasted.
        kv.early_tokens = max(0, kv.early_tokens - n_tokens)
        kv.out.append((now_s, n_pages))

    def _reload(self, kv: _Session, n_pages: int, now_s: float) -> int:
        """Load this many pages next to the resident ones. Returns their tokens."""
        if n_pages <= 0:
            return 0
        kv.missed = True
        n_tokens = -self._tokens(kv, kv.n_resident)
        kv.n_resident += n_pages
        self._free -= n_pages
        n_tokens += self._tokens(kv, kv.n_resident)
        self.outcome.reloaded_pages += n_pages
        self.outcome.reloaded_tokens += n_tokens
        newest_s = kv.out[-1][0]
        self.outcome.cycles += now_s - newest_s <= CYCLE_S
        while n_pages:
            evicted_s, n_out = kv.out.pop()
            back = min(n_pages, n_out)
            n_pages -= back
            if n_out > back:
                kv.out.append((evicted_s, n_out - back))
        return n_tokens

    def _tokens(self, kv: _Session, n_pages: int) -> int:
        return min(kv.n_tokens, n_pages * self._page_tokens)
