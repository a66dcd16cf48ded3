"""A request of an engine, and the batches it is in."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang_live.bridge.batch_work import BatchWork
from sglang_live.extensions.planner.simulation.events import Work

# SGLang reserves no more than this for a request's output.
MOST_RESERVED = 4096


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """
    Attributes:
        prompt_tokens: all tokens before the output.
        cached_tokens: those of them whose KV exists when it comes.
        max_new: tokens after which it ends; 0: it prefills only, and then calls `prefilled`.
        n_out: tokens whose step has been computed.
        reserve: max_new_tokens as the engine knows it.
        audio_s: audio that its prefill encodes.
        owner: the job in the pipeline.
        keeps_prefix: its cached tokens are a session's, which the pool counts already.
        load: begins the load of cached tokens that are on the host, and returns its end.
        background: no consumer waits for it yet.
        n_text: input tokens that have come, for a talker.
        kv: tokens it holds. n_steps: decode steps that were launched.
        computed: tokens of the prompt that were launched.
        n_in_flight: batches with it whose results have not arrived.
    """

    rid: str
    prompt_tokens: int
    cached_tokens: int
    max_new: int
    reserve: int
    owner: Any
    audio_s: float = 0.0
    keeps_prefix: bool = False
    load: Callable[[], float] | None = None
    prefilled: Callable[[], None] | None = None
    managed: bool = True
    background: bool = False
    n_text: float = math.inf
    kv: int = 0
    n_out: int = 0
    n_steps: int = 0
    computed: int = 0
    n_in_flight: int = 0
    is_aborted: bool = False
    is_finished: bool = False

    @property
    def left_to_prefill(self) -> int:
        return max(1, self.prompt_tokens + self.n_out - self.cached_tokens - self.computed)

    @property
    def reserved(self) -> int:
        return max(0, min(self.reserve - self.n_out, MOST_RESERVED))

    @property
    def must_end(self) -> bool:
        return self.is_aborted or self.n_out >= self.max_new

    @property
    def lacks_text(self) -> bool:
        """Whether the input of its next step does not exist yet."""
        return self.n_text <= self.n_steps


@dataclass(slots=True, kw_only=True)
class Batch:
    """
    Attributes:
        reqs: of a decode round, the engine's own list; of a prefill all that it computes.
        complete: requests whose prefill ends in it.
        work: for the meter; None without policies.
        launched_s: when it was launched. device: what computes it.
    """

    reqs: list[Request]
    is_prefill: bool
    launched_s: float
    device: Work
    complete: list[Request] = field(default_factory=list)
    work: BatchWork | None = None
