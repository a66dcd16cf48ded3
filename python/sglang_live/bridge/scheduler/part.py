"""A part of a scheduler: one concern, as hooks over which LiveScheduler (live.py) folds.

A part overrides the hooks that concern it. What is off has no part. Hooks run on all ranks alike,
feeds() on rank 0 alone: its messages are sent with SGLang's request broadcast, so every rank
applies them in the same round.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import NextBatchPlan, Req, ScheduleBatch

from sglang_live.bridge.round_facts import Pool

if TYPE_CHECKING:
    from sglang_live.bridge.scheduler.live import LiveScheduler


class Prefill:
    """The choice of a round's prefill; the parts narrow it, one after the other.

    Attributes:
        queue: the waiting requests to try, in order.
        later: those that stay in the queue.
        running: the requests that decode meanwhile.
        budget: most tokens of the prefill. None: the engine's own chunk; 0: no prefill.
    """

    def __init__(self, queue: list[Req], running: list[Req]):
        self.queue = queue
        self.later: list[Req] = []
        self.running = running
        self.budget: int | None = None

    def narrow(self, queue: list[Req], later: list[Req]) -> None:
        """Try these requests alone; the others of the queue stay, before those that do already."""
        self.queue = queue
        self.later = later + self.later

    def at_most(self, n_tokens: int) -> None:
        self.budget = n_tokens if self.budget is None else min(self.budget, n_tokens)


class Part:
    """
    Attributes:
        urgent: messages of this part that are handled before all requests of a round.
    """

    urgent: tuple[type, ...] = ()

    def __init__(self, scheduler: "LiveScheduler"):
        self._scheduler = scheduler

    # --- setting up ---

    def making_pools(self) -> AbstractContextManager[Any]:
        """Around the allocation of the KV pool."""
        return nullcontext()

    def start(self) -> None:
        """The engine has its memory; the loop has not begun."""

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
        """By the type of a message from the stage or of feeds()."""
        return {}

    def pool_stats(self, observer: Any) -> Any:
        """The observer by which SGLang counts the pool's tokens, or one in its place."""
        return observer

    # --- a round, in this order ---

    def before_feeds(self) -> None:
        """Rank 0 is about to take the time of the round, and messages for it."""

    def feeds(self, now_s: float) -> list[Any]:
        """Messages to all ranks for this round; called on rank 0 alone. now_s: its clock."""
        return []

    def before_round(self) -> None: ...

    def before_batch(self, running_batch: ScheduleBatch) -> None:
        """Requests that were paused are back in the running batch."""

    def before_prefill(self, running_batch: ScheduleBatch) -> None:
        """The queue is whole: a request may return to it."""

    def narrow(self, prefill: Prefill) -> None: ...

    def resumes_prefill(self) -> bool:
        """None of the chosen prompts fits: continue another in their place. Returns whether it
        does."""
        return False

    def launches_prefill(self, reqs: list[Req]) -> None:
        """A prefill of these requests was chosen."""

    def finds_no_room(self, queue: list[Req], running_batch: ScheduleBatch) -> None:
        """SGLang admitted none of these requests."""

    def after_no_prefill(self, running_batch: ScheduleBatch) -> None:
        """A prefill was tried, and none begins in this round."""

    def holds_decode(self) -> bool:
        """Whether no request decodes in this round."""
        return False

    def before_decode(self, batch: ScheduleBatch) -> None: ...

    def after_decode(self, before: list[Req], after: list[Req]) -> None:
        """SGLang has chosen the decode batch. before: its requests, with those that it ended."""

    def planned(self, plan: NextBatchPlan) -> None:
        """The round's batch is chosen."""

    def before_launch(self, batch: ScheduleBatch) -> None: ...

    def launched(self, batch: ScheduleBatch, result: Any) -> None: ...

    def before_result(self, result: Any) -> None:
        """The result of a batch is about to be read."""

    def after_result(self) -> None: ...

    def wait_limit_s(self) -> float:
        """Seconds for which the loop may wait for input when it has no batch."""
        return float("inf")

    def deadline_s(self) -> float:
        """time.monotonic() by which the next round should begin; inf: no opinion."""
        return float("inf")

    def idle(self, fully: bool) -> None:
        """A round without a batch. fully: there is no request at all."""

    def idle_limit_s(self) -> float:
        """Seconds after which a loop without requests must go on."""
        return float("inf")

    # --- requests ---

    def queues(self, req: Req, is_retracted: bool) -> None:
        """A request is about to join the queue."""

    def queued(self, req: Req) -> None: ...

    def before_request(self) -> None:
        """A request from outside is about to be handled."""

    def before_session(self) -> None:
        """A session is about to open."""

    def cannot_step(self) -> Iterable[str]:
        """Ids of requests that cannot step in this round."""
        return ()

    def may_block(self) -> bool:
        """Whether blocks() may be true of any request; saves the check of each."""
        return False

    def blocks(self, req: Req) -> bool:
        """Whether the input of the request's next step does not exist yet."""
        return False

    def may_pause(self) -> bool:
        """As may_block(), of pauses()."""
        return False

    def pauses(self, req: Req) -> bool:
        """Whether the request should not step in this round."""
        return False

    def lacks_input(self, req: Req) -> bool:
        """Whether a waiting request cannot be prefilled yet, whatever the policies say."""
        return False

    def awaits_input(self) -> bool:
        """Whether requests can go on after a message or some time, if no batch can run now."""
        return False

    def paused(self, req: Req) -> None:
        """The request was paused, though it could step."""

    def resumed(self, rid: str) -> None: ...

    def compacted(self, rid: str, n_tokens: int) -> None:
        """A running request has n_tokens of its KV less."""

    def retracted(self, req: Req) -> None:
        """The request loses its KV to others, and returns to the queue."""

    def interrupted(self, req: Req) -> None:
        """The request ends at its present length."""

    def ended(self, req: Req, first: bool) -> None:
        """The request has finished. first: it had not by the batch before."""

    def aborted(self, req: Req) -> None:
        """The request was aborted in the queue."""

    def abort(self, rid: str, every: bool) -> None:
        """Requests whose id begins so are to be aborted, or every one."""

    # --- memory ---

    def outside_batches(self) -> Iterable[Req]:
        """Requests with KV that are in no batch, beside SGLang's half-prefilled one."""
        return ()

    def half_prefilled(self) -> Iterable[Req]:
        """Those of them whose prompts are between two chunks."""
        return ()

    def may_requeue(self, req: Req) -> bool:
        """Whether a half-prefilled request may return to the queue, its KV to the tree."""
        return False

    def removes_prefill(self, req: Req, *, retracts: bool) -> bool:
        """Remove a half-prefilled prompt that returns to the queue. Returns False if this part has
        none.

        Args:
            retracts: it loses its KV.
        """
        return False

    def releases(self, req: Req) -> bool:
        """Free the request's KV and row. Returns False if that is left to SGLang."""
        return False

    def entitled(self, waiting: list[Req]) -> list[Req]:
        """Those of the waiting requests for which idle sessions may be evicted."""
        return waiting

    def before_retraction(self, batch: ScheduleBatch) -> None:
        """Memory is short for the batch's next step."""

    def retraction_order(
        self, pool: Pool, blocked: list[str]
    ) -> tuple[list[str], list[str]] | None:
        """Requests as they are retracted: those that have time, and the others. None: no opinion.

        Args:
            blocked: paused requests whose input does not exist yet.
        """
        return None

    def room_comes(self, req: Req, running_batch: ScheduleBatch) -> bool:
        """Whether memory for the request is about to come, so that no other need lose its KV."""
        return False

    def before_retract_all(self) -> None:
        """SGLang is about to retract all requests."""

    def pool(self, pool: Pool) -> Pool:
        """The pool as policies are to see it."""
        return pool

    def obtainable_tokens(self, n_tokens: int) -> int:
        """Size that a pool of n_tokens may reach while a request waits."""
        return n_tokens

    # --- reports ---

    def totals(self) -> dict[str, float]:
        """Counters, seconds and gauges since the engine's start."""
        return {}


def set_frozen(observer: Any, name: str, value: Any) -> None:
    """Set an attribute of one of SGLang's observers, which are frozen dataclasses."""
    object.__setattr__(observer, name, value)
