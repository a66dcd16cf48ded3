"""Refuses requests that an engine was processing when it died, twice.

In: a hash of the content of every request to an engine; which engine died. Out: SuspectError.
Owner: one Suspects per server. An SDK repeats a request that failed; if that request has killed the
engine, its repetition would kill it again and again, for all users. The first death says little:
most requests were beside the cause.
"""

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, Metric

from sglang_live.clock import Clock
from sglang_live.core import HistoryItem, TextPart, TurnRequest
from sglang_live.errors import BadInputError
from sglang_live.ids import turn_of

log = logging.getLogger(__name__)

KEPT_S = 600.0
# Deaths within that time from which on a request is refused.
DEATHS = 2
# Each is 32 bytes. Never are more requests than this in engines at once.
MAX_KEPT = 4096
# A connection to an engine may break before its end is noticed.
BROKEN_BEFORE_S = 10.0


class SuspectError(BadInputError):
    """A repetition cannot help, so this is no status at which clients repeat a request."""

    code = "refused_after_engine_death"


@dataclass(eq=False, slots=True)
class EngineRequest:
    """A request that an engine has, other than through a job.

    engine: name of the replica.
    content: hash of the request.
    broken_s: time at which its connection broke. None: it did not.
    """

    engine: str
    content: bytes
    broken_s: float | None = None


@dataclass(eq=False)
class Suspects:
    """
    Attributes:
        n_suspected: requests that were in an engine when it died.
        n_refused: requests refused because of that.
    """

    clock: Clock
    max_kept: int = MAX_KEPT
    n_suspected: int = 0
    n_refused: int = 0
    # Deaths with each request, and until when they count.
    _deaths: OrderedDict[bytes, tuple[int, float]] = field(default_factory=OrderedDict)
    _turns: dict[str, bytes] = field(default_factory=dict)
    _requests: set[EngineRequest] = field(default_factory=set)

    def check(self, content: bytes) -> None:
        """Raises SuspectError if it was in an engine when that died, DEATHS times, the latest less
        than KEPT_S ago."""
        now_s = self.clock.now_s()
        self._forget(now_s)
        n_deaths, until_s = self._deaths.get(content, (0, 0.0))
        if n_deaths < DEATHS:
            return
        self.n_refused += 1
        left_s = until_s - now_s
        log.warning("suspect_refused content=%s left_s=%.0f", content.hex()[:12], left_s)
        raise SuspectError(
            "This request was being processed each time the model's engine died, and is not tried "
            f"again for {max(1, round(left_s / 60))} min. Repeating it will not help; other "
            "requests are served."
        )

    @contextmanager
    def turn(self, turn_id: str, content: bytes) -> Iterator[None]:
        """Context in which the turn's jobs may be in engines. Raises SuspectError."""
        self.check(content)
        self._turns[turn_id] = content
        try:
            yield
        finally:
            del self._turns[turn_id]

    def begin(self, engine: str, content: bytes) -> EngineRequest:
        """Note a request to an engine that is no job. Raises SuspectError."""
        self.check(content)
        request = EngineRequest(engine, content)
        self._requests.add(request)
        return request

    def end(self, request: EngineRequest, *, broken: bool = False) -> None:
        """Note the end of a request.

        Args:
            broken: its connection broke, perhaps because the engine died.
        """
        now_s = self.clock.now_s()
        if broken:
            request.broken_s = now_s
        else:
            self._requests.discard(request)
        self._requests = {
            request
            for request in self._requests
            if request.broken_s is None or request.broken_s > now_s - BROKEN_BEFORE_S
        }

    def died(self, engine: str, jobs: Iterable[str]) -> None:
        """Note the requests that an engine had not finished when it died.

        Args:
            engine: name of the replica.
            jobs: ids of those it had begun.
        """
        now_s = self.clock.now_s()
        turns = {turn_of(job_id) for job_id in jobs}
        found = {self._turns[turn_id] for turn_id in turns if turn_id in self._turns}
        running = {
            request
            for request in self._requests
            if request.engine == engine
            and (request.broken_s is None or request.broken_s > now_s - BROKEN_BEFORE_S)
        }
        found |= {request.content for request in running}
        self._requests = {f for f in self._requests if f not in running or f.broken_s is None}
        self._forget(now_s)
        for content in found:
            n_deaths, _ = self._deaths.pop(content, (0, 0.0))
            self._deaths[content] = n_deaths + 1, now_s + KEPT_S
        while len(self._deaths) > self.max_kept:
            self._deaths.popitem(last=False)
        self.n_suspected += len(found)
        log.error(
            "engine_died engine=%s suspects=%s", engine, [c.hex()[:12] for c in sorted(found)]
        )

    def _forget(self, now_s: float) -> None:
        while self._deaths and next(iter(self._deaths.values()))[1] <= now_s:
            self._deaths.popitem(last=False)

    def collect(self) -> Iterator[Metric]:
        """For a prometheus_client registry."""
        suspected = CounterMetricFamily(
            "sglang_live_suspects", "Requests that were in an engine when it died."
        )
        suspected.add_metric([], self.n_suspected)
        refused = CounterMetricFamily(
            "sglang_live_suspects_refused", "Requests refused because of that."
        )
        refused.add_metric([], self.n_refused)
        yield from (suspected, refused)


def digest(*parts: bytes) -> bytes:
    """Hash of all parts and of their boundaries."""
    hashed = hashlib.blake2b(digest_size=32)
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    return hashed.digest()


class TurnContent:
    """Hashes of one session's turns. Each item is hashed once, however long the conversation."""

    def __init__(self) -> None:
        self._items: dict[str, bytes] = {}  # by key, which changes with the content

    def of(self, turn: TurnRequest) -> bytes:
        """Hash of what the engines are given for the turn: neither of ids nor of time."""
        items = {item.key: self._items.get(item.key) or _item(item) for item in turn.history}
        if not turn.stateless:
            self._items = items
        sampling = (turn.max_output_tokens, turn.temperature, turn.seed, turn.wants_audio)
        tools = turn.tools
        settings = (turn.voice, turn.script, tools.functions, tools.must_call, turn.options)
        return digest(
            turn.instructions.encode("utf-8", "surrogatepass"),
            repr((sampling, settings)).encode("utf-8", "surrogatepass"),
            *items.values(),
        )


def _item(item: HistoryItem) -> bytes:
    parts = [
        part.text.encode("utf-8", "surrogatepass") if isinstance(part, TextPart) else part.digest
        for part in item.parts
    ]
    shape = repr((item.role, item.token_ids, item.opens, item.closes))
    kinds = "".join(type(part).__name__ for part in item.parts)
    return digest(shape.encode(), kinds.encode(), *parts)
