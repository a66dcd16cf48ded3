"""One scheduler's part in the moves of KV memory between two engines.

In: the mover's orders, over a Unix socket. Out: answers, and what this engine needs. At most one
order is open; a drain goes on from round to round until the end of the pool is free, or its time
is over: then what is free is released.
Owner: one ElasticOrders per scheduler. Never waits, but for the greeting.
"""

import json
import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from sglang_live.extensions.elastic.engine.elastic_memory import Geometry, Passed
from sglang_live.extensions.elastic.engine.granule_store import GranuleStore
from sglang_live.extensions.elastic.engine.pool import ElasticPool
from sglang_live.extensions.elastic.messages import (
    ELASTIC_ENV,
    Give,
    Given,
    Hello,
    Need,
    Obtainable,
    Packet,
    PeerDied,
    Take,
    Taken,
    ToEngine,
    Welcome,
    receive,
    send,
)

log = logging.getLogger(__name__)

# Address space of a pool, as a multiple of its memory at start. It costs page tables only where
# memory is mapped.
RESERVE = 16
# Longest time for running requests to leave the end of a pool. The other engine's requests wait.
DRAIN_S = 1.0
# SGLang reserves up to 4,096 tokens for a request's output (CLIP_MAX_NEW_TOKENS), and a pool
# that cannot hold a prompt besides refuses every request.
FLOOR_TOKENS = 4096 + 1024
_GREETING_S = 60.0


class ElasticOrders:
    """
    Attributes:
        pool: None until the engine has one.
        obtainable: granules that this engine could receive now.
    """

    def __init__(self, stage: str, link: socket.socket):
        self._stage = stage
        self._link = link
        self.pool: ElasticPool | None = None
        self.obtainable = 0
        self._give: Give | None = None
        self._give_until_s = 0.0
        self._releasing: Future[Passed] | None = None
        self._taken: Taken | None = None  # not sent yet
        self._need: Need | None = None
        self.totals = dict.fromkeys(
            (
                "elastic_received",
                "elastic_released",
                "elastic_refused_in_use",
                "elastic_refused_unmapped",
                "elastic_refused_too_long",
                "elastic_unsent",
                "elastic_evicted_tokens",
                "elastic_drain_s",
                "elastic_resize_s",
                "elastic_longest_resize_s",
            ),
            0.0,
        )

    @staticmethod
    def from_env() -> "ElasticOrders":
        """Raises OSError if the mover cannot be reached."""
        path, stage = json.loads(os.environ[ELASTIC_ENV])
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.settimeout(_GREETING_S)
        link.connect(path)
        return ElasticOrders(stage, link)

    def greet(self, store: GranuleStore, geometry: Geometry, n_tokens: int) -> int:
        """Tell the mover of this engine's pool. Returns the granules that it begins with.

        Raises:
            OSError, EOFError: there is no answer, because the mover refuses this engine.
        """
        start, per_unit = geometry.units(n_tokens), geometry.granules
        floor = min(start, geometry.units_for(FLOOR_TOKENS))
        hello = Hello(
            stage=self._stage,
            unit=per_unit,
            start=start * per_unit,
            floor=floor * per_unit,
            limit=RESERVE * start * per_unit,
            place=store.place,
            most_passed=store.most_passed,
        )
        send(self._link, hello)
        packet = receive(self._link, Welcome, wait=True)
        assert packet is not None and isinstance(packet.message, Welcome)
        self._link.setblocking(False)
        return packet.message.granules

    def events(self) -> tuple[int, int]:
        """Files that are readable when step() is due."""
        assert self.pool is not None
        return self._link.fileno(), self.pool.done_event

    def step(self, now_s: float, evict: Callable[[int, bool], int]) -> bool:
        """Take orders and carry them on. Returns whether the pool has or may get another size.

        Args:
            evict: evicts a number of the radix tree's tokens, or, with True, of the tree's and of
                idle sessions'; returns how many it has.
        Raises:
            OSError, EOFError: the mover is gone, and with it the server.
        """
        assert self.pool is not None
        before = self.pool.capacity_tokens, self.obtainable
        with suppress(BlockingIOError):
            os.eventfd_read(self.pool.done_event)
        while (packet := receive(self._link, ToEngine)) is not None:
            self._take_order(packet, now_s)
        if self._give is not None and self._releasing is None:
            self._drain(self._give, now_s, evict)
        if self._releasing is not None and self._releasing.done():
            self._answer_give(self._releasing.result())
        self._answer_take()
        return (self.pool.capacity_tokens, self.obtainable) != before

    def report_need(self, needed: int, reserved: int, idle: int) -> None:
        """Tell the mover what this engine needs, in tokens, if that has changed."""
        assert self.pool is not None
        geometry = self.pool.memory.geometry

        def granules(tokens: int) -> int:
            return geometry.units_for(tokens) * geometry.granules if tokens else 0

        need = Need(
            size=self.pool.granules,
            needed=granules(needed),
            reserved=granules(reserved),
            idle=granules(idle),
        )
        if need != self._need and self._sends(need):
            self._need = need

    def report(self) -> dict[str, float]:
        assert self.pool is not None
        for seconds in self.pool.take_resize_s():
            self.totals["elastic_resize_s"] += seconds
            longest_s = max(self.totals["elastic_longest_resize_s"], seconds)
            self.totals["elastic_longest_resize_s"] = longest_s
        return self.totals | {"elastic_tokens": float(self.pool.capacity_tokens)}

    def _take_order(self, packet: Packet, now_s: float) -> None:
        assert self.pool is not None
        order = packet.message
        if isinstance(order, Take):
            self.pool.receive(order.runs, packet.files)
        elif isinstance(order, Give):
            self.pool.begin_drain(order.granules)
            self._give = order
            self._give_until_s = now_s + DRAIN_S
        elif isinstance(order, Obtainable):
            self.obtainable = order.granules
        elif isinstance(order, PeerDied):
            self.pool.free_away()

    def _drain(self, give: Give, now_s: float, evict: Callable[[int, bool], int]) -> None:
        assert self.pool is not None
        n_used = self.pool.drain()
        if n_used and (n_evicted := evict(n_used, give.urgent)):
            self.totals["elastic_evicted_tokens"] += n_evicted
            n_used = self.pool.drain()
        if not n_used or now_s >= self._give_until_s:
            self.totals["elastic_drain_s"] += now_s - (self._give_until_s - DRAIN_S)
            self._releasing = self.pool.release(give.granules)

    def _answer_give(self, passed: Passed) -> None:
        assert self.pool is not None
        if not self._sends(Given(passed.runs, self.pool.granules), passed.files):
            return
        self._give = self._releasing = None
        self.pool.released()
        self.totals["elastic_released"] += bool(passed.runs)
        self.totals["elastic_refused_in_use"] += not passed.runs

    def _answer_take(self) -> None:
        assert self.pool is not None
        try:
            if self.pool.mapped():
                self._taken = Taken("", self.pool.granules)
                self.totals["elastic_received"] += 1
        except (OSError, ValueError) as failure:
            log.error("kv_memory_not_mapped error=%s", failure)
            self._taken = Taken(str(failure), self.pool.granules)
            self.totals["elastic_refused_unmapped"] += 1
        if self._taken is not None and self._sends(self._taken):
            self._taken = None

    def _sends(self, message: Need | Given | Taken, files: tuple[int, ...] = ()) -> bool:
        """Send a message. Returns False while the mover does not read: a later round tries again.

        Raises:
            OSError: the mover is gone.
        """
        try:
            send(self._link, message, files)
        except BlockingIOError:
            self.totals["elastic_unsent"] += 1
            return False
        return True
