"""Moves KV memory between the thinker and the talker of one host.

In: what each engine needs. Out: orders to give and to take, one move at a time. The sizes of both
pools, and what is on its way, always add up to what both began with, also when a process dies: the
other engine keeps what it has, and the next process begins with the rest. The mover passes memory
on as files, and has none of it itself, wherever it is.
Owner: the server's ElasticPools.
"""

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path

import msgspec

from sglang_live.aio import background
from sglang_live.extensions.elastic.engines import Engine, accepted
from sglang_live.extensions.elastic.granules import Run, count
from sglang_live.extensions.elastic.messages import (
    STAGES,
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
    ToMover,
    Welcome,
    receive,
    send,
)
from sglang_live.extensions.elastic.policy import (
    ElasticConfig,
    PeakWindow,
    PoolView,
    decide,
    spare_for_requests,
)

log = logging.getLogger(__name__)

# A need that falls out of the window is noticed by then.
_REVIEW_S = 1.0
# An engine that could not free its memory is not asked again at once.
_PAUSE_S = 0.5
# An engine that answers no order for so long may never do so: nothing is promised of its memory.
_LATE_S = 3.0
# An engine whose greeting is late is not ours.
_MOST_UNNAMED = 8


class _EngineLostError(Exception):
    """The engine's process has ended, or does not read its orders."""


class KvMover:
    """
    Args:
        config: of the policy.
        now_s: clock of the policy's window.

    Attributes:
        counts: moves, and reasons why memory did not move.
    """

    def __init__(
        self,
        config: ElasticConfig | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ):
        self._now_s = now_s
        self._config = config or ElasticConfig()
        self._window_s = self._config.elastic_window_s
        self._engines: dict[str, Engine] = {}
        self._unnamed: set[Engine] = set()
        self._starts: dict[str, int] = {}
        self._moving = asyncio.Lock()  # held while sizes change
        self._tasks: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()
        self._paused_until_s = dict.fromkeys(STAGES, 0.0)
        self._is_late = False  # the answer to the open order
        self._listener: socket.socket | None = None
        self.counts: Counter[str] = Counter()
        self.move_s = 0.0

    def start(self, path: Path) -> None:
        """
        Args:
            path: of the socket, in a folder of this user alone.
        Raises:
            OSError: it cannot be made.
        """
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(_MOST_UNNAMED)
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)
        self._spawn(self._review())

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            Path(self._listener.getsockname()).unlink(missing_ok=True)
            self._listener.close()
        for engine in [*self._engines.values(), *self._unnamed]:
            self._close(engine)
        self._engines = {}
        self._unnamed = set()

    def report(self) -> dict[str, float]:
        report = {name: float(n) for name, n in self.counts.items()} | {"move_s": self.move_s}
        for stage, engine in self._engines.items():
            report[f"{stage}_granules"] = float(engine.size)
            report[f"{stage}_obtainable"] = float(max(0, engine.obtainable))
        return report

    async def move(self, to: str, granules: int, *, urgent: bool) -> int:
        """Move memory to a stage, whatever the policy says. Returns the granules that have moved.

        Args:
            urgent: the giver evicts idle sessions for it.
        """
        async with self._moving:
            receiver, giver = self._engines.get(to), self._other(to)
            if receiver is None or giver is None or receiver.hello is None or giver.hello is None:
                return 0
            most = min(giver.size - giver.hello.floor, receiver.hello.limit - receiver.size)
            moved = await self._move(giver, receiver, min(granules, most), urgent) if most else 0
            self.counts["granules_moved"] += moved
            self._tell_obtainable()
            return moved

    # --- engines that come and go ---

    def _accept(self) -> None:
        assert self._listener is not None
        engine = accepted(self._listener, PeakWindow(self._window_s), PeakWindow(self._window_s))
        if engine is None or len(self._unnamed) >= _MOST_UNNAMED:
            if engine is not None:
                engine.close()
            self.counts["refused_connection"] += 1
            return
        self._unnamed.add(engine)
        loop = asyncio.get_running_loop()
        loop.add_reader(engine.link, self._read, engine)
        loop.add_reader(engine.pidfd, self._ended, engine)

    def _ended(self, engine: Engine) -> None:
        """The process has ended: nothing uses the memory that it had."""
        self._close(engine)
        self._unnamed.discard(engine)
        if engine.answer is not None and not engine.answer.done():
            engine.answer.set_exception(_EngineLostError())
        stage = engine.hello.stage if engine.hello is not None else ""
        if self._engines.get(stage) is not engine:
            return
        del self._engines[stage]
        self.counts["engines_ended"] += 1
        log.info("kv_engine_ended stage=%s granules=%d", stage, engine.size)
        self._spawn(self._free_after(stage))

    async def _free_after(self, stage: str) -> None:
        async with self._moving:  # what was on its way to it is with its giver again
            if (other := self._other(stage)) is not None:
                self._send(other, PeerDied())
            self._tell_obtainable()

    def _close(self, engine: Engine) -> None:
        loop = asyncio.get_running_loop()
        for file in (engine.pidfd, engine.link.fileno()):
            if file >= 0:
                loop.remove_reader(file)
        engine.close()

    def _read(self, engine: Engine) -> None:
        try:
            while (packet := receive(engine.link, ToMover)) is not None:
                self._take(engine, packet)
        except (OSError, EOFError, ValueError, msgspec.MsgspecError) as error:
            # It may still use its memory; _ended() follows.
            if not isinstance(error, EOFError):
                log.warning("kv_engine_link_broken error=%r", error)
            asyncio.get_running_loop().remove_reader(engine.link)
            engine.link.close()

    def _take(self, engine: Engine, packet: Packet) -> None:
        message = packet.message
        if isinstance(message, Hello):
            packet.close()
            engine.hello = message
            self._spawn(self._welcome(engine, message))
        elif isinstance(message, Need):
            packet.close()
            engine.need, now_s = message, self._now_s()
            engine.peak_needed.add(now_s, message.reserved)
            engine.peak_wished.add(now_s, message.reserved + message.idle)
            self._news.set()
        elif engine.answer is not None and not engine.answer.done():
            engine.answer.set_result(packet)
        else:
            packet.close()

    async def _welcome(self, engine: Engine, hello: Hello) -> None:
        """Tell a new engine its size: what the other one has not."""
        async with self._moving:
            self._unnamed.discard(engine)
            if hello.stage not in STAGES or hello.stage in self._engines or engine.pidfd < 0:
                self._close(engine)
                self.counts["refused_connection"] += 1
                return
            other = self._other(hello.stage)
            if other is not None and other.hello is not None and other.hello.place != hello.place:
                log.error("kv_engine_elsewhere place=%s other=%s", hello.place, other.hello.place)
                self._close(engine)
                self.counts["refused_elsewhere"] += 1
                return
            self._starts.setdefault(hello.stage, hello.start)
            engine.size = hello.start
            if other is not None and len(self._starts) == len(STAGES):
                rest = sum(self._starts.values()) - other.size
                engine.size = max(hello.unit, min(rest, hello.limit))
            self._engines[hello.stage] = engine
            self._send(engine, Welcome(engine.size))
            log.info("kv_engine_joined stage=%s granules=%d", hello.stage, engine.size)

    def _other(self, stage: str) -> Engine | None:
        return self._engines.get(STAGES[1 - STAGES.index(stage)])

    # --- moves ---

    async def _review(self) -> None:
        while True:
            with suppress(TimeoutError):
                # Python 3.11's wait_for loses a cancellation that comes with the news.
                async with asyncio.timeout(_REVIEW_S):
                    await self._news.wait()
            self._news.clear()
            try:
                async with self._moving:
                    await self._move_once()
                    self._tell_obtainable()
            except Exception:
                # The next move may succeed; sizes are as the engines answered last.
                log.exception("kv_move_failed")
                self.counts["moves_failed"] += 1

    def _views(self) -> tuple[PoolView, PoolView] | None:
        """None: an engine is missing."""
        views = []
        for stage in STAGES:
            engine = self._engines.get(stage)
            if engine is None or engine.hello is None or engine.need is None:
                return None
            now_s, need = self._now_s(), engine.need
            views.append(
                PoolView(
                    size=engine.size,
                    start=self._starts[stage],
                    floor=engine.hello.floor,
                    limit=engine.hello.limit,
                    needed=need.needed,
                    wished=need.needed + need.idle,
                    peak_needed=engine.peak_needed.peak(now_s),
                    peak_wished=engine.peak_wished.peak(now_s),
                )
            )
        return views[0], views[1]

    def _tell_obtainable(self) -> None:
        views = None if self._is_late else self._views()
        for at, stage in enumerate(STAGES):
            engine = self._engines.get(stage)
            if engine is None:
                continue
            n = spare_for_requests(views[1 - at]) if views is not None else 0
            if n != engine.obtainable and self._send(engine, Obtainable(n)):
                engine.obtainable = n

    async def _move_once(self) -> None:
        views = self._views()
        move = decide(views, self._config) if views is not None else None
        if move is None:
            return
        giver_stage, receiver_stage = STAGES[1 - move.receiver], STAGES[move.receiver]
        if self._now_s() < self._paused_until_s[giver_stage]:
            return
        giver, receiver = self._engines[giver_stage], self._engines[receiver_stage]
        began_s = self._now_s()
        moved = await self._move(giver, receiver, move.granules, move.urgent)
        self.move_s += self._now_s() - began_s
        kind = "urgent" if move.urgent else "unhurried"
        self.counts[f"moves_{kind}" if moved else "refused_in_use"] += 1
        self.counts["granules_moved"] += moved
        if moved < move.granules:
            self._paused_until_s[giver_stage] = self._now_s() + _PAUSE_S
        log.info(
            "kv_moved to=%s granules=%d of=%d urgent=%s ms=%.1f",
            receiver_stage,
            moved,
            move.granules,
            move.urgent,
            1000 * (self._now_s() - began_s),
        )

    async def _move(self, giver: Engine, receiver: Engine, n: int, urgent: bool) -> int:
        """Returns the granules that have moved, in as many messages as it takes."""
        assert giver.hello is not None
        moved = 0
        while moved < n:
            asked = min(n - moved, giver.hello.most_passed)
            part = await self._move_part(giver, receiver, asked, urgent)
            moved += part
            if part < asked:
                break
        return moved

    async def _move_part(self, giver: Engine, receiver: Engine, n: int, urgent: bool) -> int:
        try:
            packet = await self._order(giver, Give(n, urgent))
        except _EngineLostError:
            return 0
        given = packet.message
        assert isinstance(given, Given)
        giver.size = given.size
        try:
            if not given.runs:
                return 0
            if await self._hand_over(receiver, given.runs, packet.files):
                return count(given.runs)
            self.counts["returned"] += 1
            if not await self._hand_over(giver, given.runs, packet.files):
                self.counts["granules_lost"] += count(given.runs)
            return 0
        finally:
            packet.close()

    async def _hand_over(self, to: Engine, runs: list[Run], files: list[int]) -> bool:
        """Whether the engine has mapped the memory."""
        try:
            packet = await self._order(to, Take(runs), tuple(files))
        except _EngineLostError:
            return False
        packet.close()
        taken = packet.message
        assert isinstance(taken, Taken)
        to.size = taken.size
        if taken.error:
            self.counts["refused_unmapped"] += 1
        return not taken.error

    async def _order(
        self, engine: Engine, order: Give | Take, files: tuple[int, ...] = ()
    ) -> Packet:
        """Send an order and wait for its answer, however long: a process that hangs is ended by the
        supervisor.

        Raises:
            _EngineLostError: there will be none.
        """
        answer: asyncio.Future[Packet] = asyncio.get_running_loop().create_future()
        engine.answer = answer
        if engine.pidfd < 0 or not self._send(engine, order, files):
            raise _EngineLostError
        try:
            await asyncio.wait([answer], timeout=_LATE_S)
            if not answer.done():
                self.counts["orders_late"] += 1
                self._is_late = True
                self._tell_obtainable()
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                answer.result().close()  # it came while the server stops
            raise
        finally:
            engine.answer = None
            self._is_late = False

    def _send(self, engine: Engine, message: ToEngine, files: tuple[int, ...] = ()) -> bool:
        """Whether it was sent; not to an engine that has gone, or does not read."""
        try:
            send(engine.link, message, files)
        except OSError:
            self.counts["orders_unsent"] += 1
            return False
        return True

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = background(work, "kv mover")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
