"""A simulated stage with its pipeline and its listeners: rounds, chunks, sound, gaps.

A decode round takes round_s + per_stream_s for each stream in it. Prefill goes first, as in SGLang,
one chunk of one prompt a round. A full chunk of sound is heard pipeline_s later. Time is the sum
of the rounds.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from sglang_live.policy.decide import RoundPolicy
from sglang_live.policy.view import Round, StageRates, StageView

STEP_S = 0.08
CHUNK_STEPS = 4
IDLE_S = 0.01
PREFILL_CHUNK = 2048


@dataclass(slots=True, kw_only=True)
class Reply:
    """A stream and its listener. stands_still: the listener never goes on after the first sound."""

    arrives_s: float = 0.0
    prompt_tokens: int = 20
    steps: int = 100
    stands_still: bool = False
    # State.
    computed: int = 0
    produced: int = 0
    state: str = "to come"
    since_s: float = 0.0
    admitted_s: float | None = None
    under_way: deque = field(default_factory=deque)
    sounded_s: float = 0.0
    plays_until_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    longest_hold_s: float = 0.0

    def enter(self, state: str, now_s: float) -> None:
        if self.state == "paused":
            self.longest_hold_s = max(self.longest_hold_s, now_s - self.since_s)
        if state != self.state:
            self.state, self.since_s = state, now_s

    def step(self, end_s: float, pipeline_s: float) -> None:
        self.produced += 1
        if self.produced % CHUNK_STEPS == 0 or self.produced == self.steps:
            steps = (self.produced - 1) % CHUNK_STEPS + 1
            self.under_way.append((end_s + pipeline_s, steps * STEP_S))

    def listen(self, now_s: float) -> None:
        while self.under_way and self.under_way[0][0] <= now_s:
            at_s, chunk_s = self.under_way.popleft()
            if self.plays_until_s is None:
                self.plays_until_s = at_s
            elif at_s > self.plays_until_s and not self.stands_still:
                self.gaps_s.append(at_s - self.plays_until_s)
            self.plays_until_s = max(self.plays_until_s, at_s) + chunk_s
            self.sounded_s += chunk_s

    def buffered_s(self, now_s: float) -> float:
        if self.plays_until_s is None or self.stands_still:
            return self.produced * STEP_S
        heard_s = self.sounded_s - max(0.0, self.plays_until_s - now_s)
        return self.produced * STEP_S - heard_s

    @property
    def kv_tokens(self) -> int:
        return self.computed + self.produced

    @property
    def reserved_tokens(self) -> int:
        return self.prompt_tokens + self.steps if self.admitted_s is not None else 0


@dataclass(slots=True, kw_only=True)
class ToyStage:
    replies: list[Reply]
    policies: RoundPolicy
    round_s: float = 0.01
    per_stream_s: float = 0.0005
    prefill_s_per_token: float = 1e-4
    prefill_s_fixed: float = 0.005
    pipeline_s: float = 0.2
    capacity_tokens: int = 1_000_000
    now_s: float = 0.0
    flips: int = 0
    partial_prefill: Reply | None = None
    last_prefill_s: float = float("-inf")
    decoded_since_prefill: bool = True
    mean_round_s: float = 0.0

    def run(self, until_s: float) -> None:
        self.mean_round_s = self.round_s
        while self.now_s < until_s and any(r.state != "done" for r in self.replies):
            for reply in self.replies:
                reply.listen(self.now_s)
                if reply.state == "to come" and reply.arrives_s <= self.now_s:
                    reply.enter("waiting", self.now_s)
            live = [r for r in self.replies if r.state not in ("to come", "done")]
            decided = self.policies.decide(self._view(live))
            if not (self._prefill(live, decided) or self._decode(live, decided)):
                self._sleep(decided.next_change_s)
        for reply in self.replies:
            reply.listen(float("inf"))

    def _sleep(self, next_change_s: float) -> None:
        """Until a request arrives, a chunk is heard, or a stream resumes."""
        arrivals = [r.arrives_s for r in self.replies if r.state == "to come"]
        sounds = [r.under_way[0][0] for r in self.replies if r.under_way]
        self.now_s = max(min(arrivals + sounds + [next_change_s]), self.now_s + IDLE_S)

    def _prefill(self, live: list[Reply], decided: Round) -> bool:
        budget = PREFILL_CHUNK if decided.prefill_budget is None else decided.prefill_budget
        if budget == 0:
            return False
        reply = self.partial_prefill
        if reply is None:
            if not len(decided.admit):
                return False
            reply = live[decided.admit[0]]
            if reply.prompt_tokens + reply.steps > self._free_tokens(live):
                return False  # SGLang's own check, for orders without one
            reply.admitted_s = self.now_s
            reply.enter("running", self.now_s)
        tokens = min(reply.prompt_tokens - reply.computed, budget, PREFILL_CHUNK)
        reply.computed += tokens
        self.partial_prefill = reply if reply.computed < reply.prompt_tokens else None
        self.now_s += self.prefill_s_fixed + tokens * self.prefill_s_per_token
        self.last_prefill_s = self.now_s
        self.decoded_since_prefill = False
        return True

    def _decode(self, live: list[Reply], decided: Round) -> bool:
        batch = []
        for reply, pause in zip(live, decided.pause, strict=True):
            if reply.state == "waiting" or reply is self.partial_prefill:
                continue
            state = "paused" if pause else "running"
            self.flips += state != reply.state
            reply.enter(state, self.now_s)
            if not pause:
                batch.append(reply)
        if not batch:
            return False
        took_s = self.round_s + self.per_stream_s * len(batch)
        self.now_s += took_s
        self.decoded_since_prefill = True
        self.mean_round_s += 0.1 * (took_s - self.mean_round_s)
        for reply in batch:
            reply.step(self.now_s, self.pipeline_s)
            if reply.produced == reply.steps:
                reply.enter("done", self.now_s)
        return True

    def _free_tokens(self, live: list[Reply]) -> int:
        return self.capacity_tokens - sum(r.reserved_tokens for r in live)

    def _view(self, live: list[Reply]) -> StageView:
        free = self._free_tokens(live)
        waiting = np.array([r.state == "waiting" for r in live], bool)
        need = np.array([r.prompt_tokens + r.steps for r in live], np.int64)
        return StageView(
            now_s=self.now_s,
            occupancy=1.0 - free / self.capacity_tokens,
            free_tokens=free,
            prefill_running=self.partial_prefill is not None,
            last_prefill_s=self.last_prefill_s,
            decoded_since_prefill=self.decoded_since_prefill,
            rates=StageRates(
                round_s=self.mean_round_s,
                prefill_s_per_token=self.prefill_s_per_token,
                prefill_s_fixed=self.prefill_s_fixed,
            ),
            waiting=waiting,
            paused=np.array([r.state == "paused" for r in live], bool),
            since_s=np.array([r.since_s for r in live]),
            arrived_s=np.array([r.arrives_s for r in live]),
            buffered_s=np.array([r.buffered_s(self.now_s) for r in live]),
            started=np.array([r.plays_until_s is not None for r in live], bool),
            kv_tokens=np.array([r.kv_tokens for r in live], np.int64),
            prefill_tokens=np.where(waiting, need, 0),
            managed=np.ones(len(live), bool),
        )
