"""What users experience, and what best-effort work gets done: the record of one run.

In: results of an engine, simulated or not. Out: Outcome. A listener hears one token of text every
TPOT_S, as speech, from LEAD_S after the first token on: what is ahead of that is buffered.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from benchmark.hybrid.workload import Work
from sglang_live.extensions.planner.simulation.engine.requests import Request
from sglang_live.policy.view import FRAME_S

# The paper's objectives have these two parts; speech consumes a token per frame.
TTFT_S, TPOT_S = 0.5, FRAME_S
# The stages behind the thinker make sound of its first tokens, and the player has a buffer.
LEAD_S = 0.25
# A shorter gap is hardly noticed; as in capacity/control.py.
AUDIBLE_GAP_S = 0.1
# SGLang reserves KV for the most tokens that a client allows.
_MOST_OUTPUT = 1024


@dataclass(slots=True, eq=False)
class Job:
    """
    late_s: the longest time by which a token came after its time.
    """

    work: Work
    heard: bool
    arrives_s: float
    first_s: float | None = None
    last_s: float = 0.0
    late_s: float = 0.0
    n_out: int = 0
    done_s: float | None = None

    def request(self, number: int) -> Request:
        return Request(
            rid=f"{'speak' if self.heard else 'batch'}-{number}",
            prompt_tokens=self.work.prompt_tokens,
            cached_tokens=self.work.cached_tokens,
            audio_s=self.work.audio_s,
            max_new=self.work.output_tokens,
            reserve=max(_MOST_OUTPUT, self.work.output_tokens),
            owner=self,
            managed=self.heard,
        )


def is_heard(req: Request) -> bool:
    return bool(req.owner.heard)


def token_due_s(job: Job, n: int) -> float:
    """When the listener needs token n, from 0. The first one must have come."""
    assert job.first_s is not None
    return job.first_s + LEAD_S + n * TPOT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """
    attained: share of the listeners with the first token in time, and no audible gap.
    continuous: share without an audible gap, of those whose first token came.
    normalised_s: mean time per output token, waiting included, of responses that are complete.
    be_tokens_per_s: prompt tokens that were computed for the first time, and output tokens.
    """

    n: int
    ttft_p50_s: float
    ttft_p99_s: float
    attained: float
    continuous: float
    normalised_s: float
    be_tokens_per_s: float
    n_be_done: int
    busy: float

    def to_json(self) -> dict[str, Any]:
        return {name: round(getattr(self, name), 5) for name in self.__slots__}


class Now(Protocol):
    """The time of a run: 0 is its begin."""

    def now_s(self) -> float: ...


@dataclass(slots=True)
class Record:
    """A Consumer of a simulated engine; of a running one, its clients call took() and ended().

    more: called when best-effort work is done, to give more.
    started: called when a listener begins to hear.
    """

    clock: Now
    warm_s: float
    more: Callable[[], None] = lambda: None
    started: Callable[[Request], None] = lambda req: None
    jobs: list[Job] = field(default_factory=list)
    be_tokens: int = 0
    n_be_done: int = 0

    def outputs(self, reqs: list[Request]) -> None:
        for req in reqs:
            if self.took(req.owner, 1) and req.owner.heard:
                self.started(req)

    def finished(self, req: Request) -> None:
        self.ended(req.owner)

    def took(self, job: Job, n_tokens: int) -> bool:
        """Record output tokens that came at once. Returns whether they are the first."""
        now_s, is_first = self.clock.now_s(), job.first_s is None
        if is_first:
            job.first_s = now_s
            if not job.heard and now_s >= self.warm_s:
                self.be_tokens += job.work.prompt_tokens
        elif job.heard:
            job.late_s = max(job.late_s, now_s - token_due_s(job, job.n_out))
        job.n_out, job.last_s = job.n_out + n_tokens, now_s
        if not job.heard and now_s >= self.warm_s:
            self.be_tokens += n_tokens
        return is_first

    def ended(self, job: Job) -> None:
        job.done_s = self.clock.now_s()
        if not job.heard:
            self.n_be_done += 1
            self.more()

    def outcome(self, until_s: float, tail_s: float, busy_s: float) -> Outcome:
        judged = [j for j in self.jobs if self.warm_s <= j.arrives_s < until_s - tail_s]
        waits = [(j.first_s if j.first_s is not None else until_s) - j.arrives_s for j in judged]
        # A response that still runs may be late already.
        for job in judged:
            if job.first_s is not None and job.done_s is None:
                job.late_s = max(job.late_s, until_s - token_due_s(job, job.n_out))
        smooth = [j.late_s <= AUDIBLE_GAP_S for j in judged if j.first_s is not None]
        attained = [
            wait_s <= TTFT_S and j.first_s is not None and j.late_s <= AUDIBLE_GAP_S
            for wait_s, j in zip(waits, judged, strict=True)
        ]
        each = [(j.done_s - j.arrives_s) / j.n_out for j in judged if j.done_s is not None]
        span_s = until_s - self.warm_s
        return Outcome(
            n=len(judged),
            ttft_p50_s=float(np.quantile(waits, 0.5)) if waits else 0.0,
            ttft_p99_s=float(np.quantile(waits, 0.99)) if waits else 0.0,
            attained=float(np.mean(attained)) if attained else 1.0,
            continuous=float(np.mean(smooth)) if smooth else 1.0,
            normalised_s=float(np.mean(each)) if each else 0.0,
            be_tokens_per_s=self.be_tokens / span_s,
            n_be_done=self.n_be_done,
            busy=busy_s / until_s,
        )
