"""The loop of one engine: SGLang's scheduler with overlap, and the live policies in it.

As bridge/scheduler/live.py: a round is stamped, decided, requests resume, a prefill is tried, then
a decode. With overlap the next batch is launched before the result of the one before it arrives.
Rates, table, views and decisions are the server's own classes. Without round policies `rounds` is
None, and the loop is SGLang's.
"""

from dataclasses import dataclass
from typing import Protocol

from sglang_live.bridge.batch_work import Launch
from sglang_live.bridge.best_effort_facts import BestEffortClass
from sglang_live.bridge.rate_meter import RateMeter
from sglang_live.bridge.round_facts import Pool, RoundStamp
from sglang_live.bridge.rounds import IDLE_WAIT_S, Rounds
from sglang_live.extensions.planner.device_model.costs import EngineCosts
from sglang_live.extensions.planner.simulation.engine.pool import KvPool
from sglang_live.extensions.planner.simulation.engine.prefill import Prefill, prefill_cost_s
from sglang_live.extensions.planner.simulation.engine.requests import Batch, Request
from sglang_live.extensions.planner.simulation.events import Act, Device, Events

_LEAST_WAIT_S = 0.001  # a scheduler waits for whole milliseconds


class Consumer(Protocol):
    """What is told of an engine's results."""

    def outputs(self, reqs: list[Request]) -> None:
        """Each of them has one more output."""
        ...

    def finished(self, req: Request) -> None: ...


@dataclass(slots=True, kw_only=True)
class EngineSpec:
    """
    Attributes:
        overlap: whether a batch is launched before the result of the one before it.
        host_s: time that the scheduler's thread takes for a batch beside the device's.
        launch_s: see HostTimes.
        reserves_all: the room of all responses is left free from their begin, so that none is
            retracted. Otherwise a part of it, as SGLang estimates.
    """

    name: str
    costs: EngineCosts
    chunk_tokens: int
    overlap: bool = True
    host_s: float = 0.0
    launch_s: float = 0.0
    reserves_all: bool = False


class Engine:
    """
    Args:
        rounds: None: no policy decides about rounds.
    Attributes:
        running: requests that decode, a new list whenever it changes.
        n_prefilled: tokens of prompts that were computed.
    """

    def __init__(
        self,
        spec: EngineSpec,
        events: Events,
        device: Device,
        pool: KvPool,
        rounds: Rounds | None,
        consumer: Consumer,
    ):
        self.spec = spec
        self.pool = pool
        self.rounds = rounds
        self._events = events
        self._device = device
        self._consumer = consumer
        predicts = rounds is not None and rounds.tells_best_effort
        self._meter = RateMeter(predicts=predicts)
        self._prefill = Prefill(spec.chunk_tokens, pool, rounds)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.n_prefilled = 0
        self.paused: dict[str, Request] = {}
        self._inbox: list[Act] = []
        self._last: Batch | None = None
        self._sleeps = True
        self._asks = self._computes = False
        self._wake_number = 0
        self._is_dead = False

    def stop(self) -> None:
        """The process has died: nothing that it had comes any more."""
        self._is_dead = True
        self._device.leave(self)

    @property
    def held(self) -> dict[str, int]:
        """Numbers of what it holds, by name."""
        rows = 0 if self.rounds is None else len(self.rounds.table)
        requests = len(self.waiting) + len(self.paused) + self.pool.rows_used
        return {"requests in the engine": requests, "tokens": self.pool.used, "table rows": rows}

    # --- messages ---

    def post(self, act: Act) -> None:
        """Have `act` applied at the begin of the next round, as a message to the scheduler."""
        self._inbox.append(act)
        if self._sleeps or self._asks:
            self._sleeps = self._asks = False
            self._events.after(0.0, self._iterate)

    def add(self, req: Request) -> None:
        """Queue a request, if it was not aborted before; within a message."""
        if req.is_aborted:
            return self._finish(req)
        self.waiting.append(req)
        self._note_waiting(req)

    def abort(self, req: Request) -> None:
        """End a request without its result; within a message."""
        req.is_aborted = True
        if req in self.waiting:
            self.waiting.remove(req)
            self._finish(req)
        elif req.rid in self.paused and not req.n_in_flight:
            del self.paused[req.rid]
            self._finish(req)

    def _note_waiting(self, req: Request) -> None:
        if self.rounds is not None:
            self.rounds.table.wait(
                req.rid,
                now_s=self.rounds.now_s,
                managed=req.managed,
                background=req.background,
                prompt_tokens=req.prompt_tokens,
                prefill_tokens=req.left_to_prefill,
                audio_s=req.audio_s,
                best_effort=self._class_of(req),
            )

    def _class_of(self, req: Request) -> BestEffortClass | None:
        """None: it is no best-effort work, or no policy tells it from other work."""
        return None

    # --- the loop ---

    def _iterate(self) -> None:
        if self._is_dead or self._computes:
            return
        self._sleeps = False
        self._read_inbox()
        self._asks = self._device.is_arbitrated
        self._device.ask(self, self._deadline_s(), self._granted)

    def _read_inbox(self) -> None:
        now_s = self._events.now_s()
        inbox = self._inbox
        self._inbox = []
        if self.rounds is not None:
            self.rounds.stamp(self._stamp(now_s))
        for act in inbox:
            act()

    def _deadline_s(self) -> float:
        """Without facts about rounds, the device is first come, first served."""
        return self._events.now_s() if self.rounds is None else self.rounds.deadline_s()

    def _granted(self) -> None:
        """Decide and launch a batch."""
        if self._asks:
            self._asks = False
            self._read_inbox()
        now_s = self._events.now_s()
        batch = self._next_batch(now_s)
        before = self._last
        self._last = batch
        if self._device.is_arbitrated or not self.spec.overlap:
            before = batch
            self._computes = self._device.is_arbitrated and batch is not None
        free_s = now_s + (self.spec.host_s if batch is not None else 0.0)
        if before is not None:
            before.device.when_done(lambda: self._arrived(before), free_s)
        elif batch is not None:
            self._events.at(free_s, self._iterate)
        else:
            self._sleep(now_s)

    def _arrived(self, batch: Batch) -> None:
        if self._is_dead:
            return
        self._computes = False
        self._process(batch)
        self._iterate()

    def _sleep(self, now_s: float) -> None:
        self._sleeps = True
        if self._inbox:
            self.post(lambda: None)
        elif self.paused or self.waiting or self.running:
            limit_s = IDLE_WAIT_S
            if self.rounds is not None:
                limit_s = min(limit_s, self.rounds.wait_limit_s())
            self._wake_number += 1
            number = self._wake_number
            self._events.at(now_s + max(_LEAST_WAIT_S, limit_s), lambda: self._wake(number))

    def _wake(self, number: int) -> None:
        if self._sleeps and number == self._wake_number:
            self._iterate()

    def _stamp(self, now_s: float) -> RoundStamp:
        return RoundStamp(
            now_s,
            rates=self._meter.rates(now_s),
            n_done=self._meter.n_done,
            prefill_done_s=self._meter.prefill_done_s,
            cost=self._meter.cost,
        )

    # --- a round ---

    def _next_batch(self, now_s: float) -> Batch | None:
        if self.rounds is not None:
            self._decide(now_s)
        if self.paused:
            self._resume()
        self._join_prefilled()
        self._pause_requests()
        self._before_prefill()
        n_waiting = len(self.waiting)
        items, self.waiting = self._prefill.choose(self.waiting, self.running, self._reserved)
        if items:
            return self._launch_prefill(items, now_s)
        assert len(self.waiting) == n_waiting
        return self._launch_decode(now_s)

    @property
    def _reserved(self) -> float:
        """Tokens that stay free for the responses of requests with KV."""
        if self.spec.reserves_all:
            partial = self._prefill.partial
            half = 0 if partial is None else partial.left_to_prefill + partial.reserved
            return half + sum(req.reserved for req in (*self.running, *self.paused.values()))
        return self._prefill.ratio * sum(req.reserved for req in self.running)

    def _join_prefilled(self) -> None:
        """Have the requests decode whose prompts the latest prefill completed."""
        if self._last is not None and self._last.complete:
            live = [req for req in self._last.complete if not req.is_finished]
            self.running = [*self.running, *live]

    def _before_prefill(self) -> None:
        """Make way for the requests that this round's prefill is for."""

    def _half_prefilled(self) -> list[str]:
        """Half-prefilled best-effort requests, which can return to the queue."""
        return []

    def _decide(self, now_s: float) -> None:
        assert self.rounds is not None
        blocked = [r for r, req in self.paused.items() if req.n_in_flight or req.lacks_text]
        partial = self._prefill.partial
        if partial is not None and self.rounds.slices_prefill:
            blocked.append(partial.rid)
        pool, half = self.pool, self._half_prefilled()
        free = pool.free - round(self._reserved) if self.spec.reserves_all else pool.free
        self.rounds.decide(
            Pool(free=free, total=pool.total, free_rows=pool.free_rows, wanted=pool.wanted()),
            prefill_running=partial is not None and partial.rid not in half,
            blocked=blocked,
            half=half,
        )

    def _must_pause(self, req: Request) -> bool:
        if req.is_finished or req.must_end:
            return False
        return req.lacks_text or (self.rounds is not None and self.rounds.pause(req.rid))

    def _pause_requests(self) -> None:
        stay = []
        for req in self.running:
            if not self._must_pause(req):
                stay.append(req)
                continue
            self.paused[req.rid] = req
            if self.rounds is not None and not req.lacks_text:
                self.rounds.paused(req.rid)
        if len(stay) < len(self.running):
            self.running = stay
            self._prefill.is_full = False

    def _resume(self) -> None:
        back = []
        for req in [req for req in self.paused.values() if not self._must_pause(req)]:
            if not req.is_finished:
                if req.n_in_flight:
                    continue
                back.append(req)
            del self.paused[req.rid]
            if self.rounds is not None:
                self.rounds.resumed(req.rid)
        if back:
            self.running = [*self.running, *back]

    def _launch_prefill(self, items: list[tuple[Request, int]], now_s: float) -> Batch:
        work = None
        if self.rounds is not None:
            for req, _ in items:
                self.rounds.table.admit(req.rid, now_s)
        self.n_prefilled += sum(n_tokens for _, n_tokens in items)
        cost_s, size = prefill_cost_s(items, self.spec.costs)
        if self.rounds is not None:
            work = self.rounds.launch_prefill(size, [req for req, _ in items])
        complete = []
        for req, n_tokens in items:
            self._prefill.launched(req, n_tokens)
            req.n_in_flight += 1
            if req is not self._prefill.partial:
                complete.append(req)
        # On a GPU each layer waits for its own KV: the last one computes after its load.
        loads_s = [req.load() for req, _ in items if req.load is not None]
        for req, _ in items:
            req.load = None
        not_before_s = 0.0
        if loads_s:
            not_before_s = max(loads_s) + cost_s / self.spec.costs.n_layers
        device = self._device.book(self.spec.name, cost_s, now_s + self.spec.launch_s, not_before_s)
        return Batch(
            reqs=[req for req, _ in items],
            is_prefill=True,
            launched_s=now_s,
            device=device,
            complete=complete,
            work=work,
        )

    def _launch_decode(self, now_s: float) -> Batch | None:
        if any(req.is_finished for req in self.running):
            self.running = [req for req in self.running if not req.is_finished]
            self._prefill.is_full = False
        reqs = self.running
        if not any(req.max_new for req in reqs):
            self._prefill.is_full = False
            return None
        self.pool.take(len(reqs))
        kv_tokens = 0
        for req in reqs:
            req.kv += 1
            req.n_steps += 1
            req.n_in_flight += 1
            kv_tokens += req.kv
        work = self.rounds.launch_decode(reqs, kv_tokens) if self.rounds is not None else None
        self._prefill.decoded()
        cost_s = self.spec.costs.decode_s(len(reqs), kv_tokens)
        device = self._device.book(self.spec.name, cost_s, now_s + self.spec.launch_s)
        return Batch(reqs=reqs, is_prefill=False, launched_s=now_s, device=device, work=work)

    # --- results ---

    def _process(self, batch: Batch) -> None:
        if batch.work is not None:
            self._meter.arrived(Launch(batch.work, batch.launched_s), self._events.now_s())
        for req in batch.reqs:
            req.n_in_flight -= 1
        # With overlap a request is in one more batch after its last one.
        reqs = batch.complete if batch.is_prefill else batch.reqs
        live = [req for req in reqs if not req.is_finished]
        for req in live:
            req.n_out += req.max_new > 0
        heard = [req for req in live if not req.is_aborted and req.max_new]
        self._consumer.outputs(heard)
        for req in live:
            if req.must_end:
                self._finish(req)

    def _finish(self, req: Request) -> None:
        req.is_finished = True
        if self._prefill.partial is req:
            self._prefill.partial = None
        if self.rounds is not None:
            self.rounds.table.remove(req.rid)
        self.pool.rows_used -= req.computed > 0
        if not req.keeps_prefix:
            self.pool.release(req.kv)
        if req.prefilled is not None:
            req.prefilled()
        else:
            self._consumer.finished(req)
