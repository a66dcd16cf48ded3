"""One policy decision per scheduling round, from facts about the engine's requests.

In: the round's time and HeardOfMany (broadcast, so equal on all ranks), what the scheduler ran.
Out: a policy.view.Round; totals for the stage. Owner: one Rounds per scheduler process.
Imports nothing of SGLang. The only clock it reads is its thread's CPU time, to measure its cost.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from sglang_live.bridge.batch_work import BatchWork
from sglang_live.bridge.best_effort_totals import BestEffortTotals
from sglang_live.bridge.lateness import Lateness
from sglang_live.bridge.round_facts import UNMEASURED, Pool, RoundStamp
from sglang_live.bridge.stream_table import StreamTable
from sglang_live.messages import HeardOfMany, StreamEvents
from sglang_live.policy.arbiter import engine_deadline_s
from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.decide import RoundPolicy
from sglang_live.policy.hybrid import retracted_first
from sglang_live.policy.policies import Policies
from sglang_live.policy.prefill import slack_s
from sglang_live.policy.view import U0, U1, U2, Round, StageView

_CLASSES = {U0: "u0", U1: "u1", U2: "u2", -1: "unknown"}
# A longer interval between two rounds is idle time: no stream was in a class for it.
_LONGEST_ROUND_S = 2.0
# Validity of a decision while no fact changes: a buffer changes by less than a frame in that time.
REVIEW_S = 0.015
# Longest wait for input while every request is paused. A message ends the wait at once.
IDLE_WAIT_S = 0.02
# Decoded tokens before a response's first sound, with margin: a chunk of the talker takes four.
FIRST_TOKENS = 16


_NO_POOL = Pool(free=0, total=0, free_rows=0)
# The decision about an empty table.
_NOTHING = Round(
    pause=np.zeros(0, bool),
    admit=np.zeros(0, np.int64),
    prefill_budget=None,
    urgency=np.zeros(0, np.int8),
)


def rounds_of(
    policies: Policies,
    config: PolicyConfig,
    chunk_tokens: int | None,
    cpu_s: Callable[[], float] = time.thread_time,
) -> "Rounds | None":
    """Rounds for these policies, or None if none of them decides about rounds.

    Args:
        config: of the stage.
        chunk_tokens: the engine's own prefill chunk; None or negative if it has none.
        cpu_s: clock by which the decisions' own cost is measured.
    """
    if not policies.decides_rounds:
        return None
    if chunk_tokens and chunk_tokens > 0:
        least = min(chunk_tokens, config.stage.min_chunk_tokens)
        config = config.changed(
            {"stage.chunk_tokens": chunk_tokens, "stage.min_chunk_tokens": least}
        )
    return Rounds(RoundPolicy.of(policies, config), cpu_s)


class Rounds:
    def __init__(self, policy: RoundPolicy, cpu_s: Callable[[], float] = time.thread_time):
        self._policy = policy
        self._cpu_s = cpu_s
        self.table = StreamTable(policy.config.stage.step_s)
        self.lateness = Lateness()
        self.rates = UNMEASURED
        self.now_s = 0.0
        names = ("rounds", "decide_s", "pauses", "resumes", "unknown", "stale", "prefill_put_off")
        self.totals: dict[str, float] = dict.fromkeys(names, 0.0)
        self._residence_s = np.zeros(4)  # by class, unknown first
        self._n_launched = self._launched_prefill = 0
        self.last_prefill_s = self._decided_s = 0.0
        self.best_effort = BestEffortTotals(policy.config.best_effort.cap_streams)
        self._last = _NOTHING
        self._managed = np.zeros(0, bool)  # of the latest decision
        self._buffered_s = np.zeros(0)
        self._events: list[tuple[str, str, float]] = []

    # --- facts ---

    def stamp(self, stamp: RoundStamp) -> None:
        if self.now_s:
            self._count_residence(stamp.now_s - self.now_s)
        self.now_s = stamp.now_s
        self.rates = stamp.rates
        self.best_effort.cost = stamp.cost
        in_flight = self._launched_prefill > stamp.n_done
        self.last_prefill_s = stamp.now_s if in_flight else stamp.prefill_done_s

    def progress(self, news: HeardOfMany) -> None:
        began_s = self._cpu_s()
        self.table.progress(news, self.now_s)
        self.totals["decide_s"] += self._cpu_s() - began_s

    def launch_decode(self, reqs: list, n_context: int = 0) -> BatchWork:
        """Record the launch of a decode round.

        Args:
            reqs: the batch's own list.
            n_context: KV tokens of the batch's requests.
        """
        n_best_effort = self.table.step(reqs, self.now_s)
        self.lateness.take(self.table.waited_s - self.rates.round_s)
        self._n_launched += 1
        if n_best_effort:
            self.best_effort.decoded(len(reqs), n_best_effort, n_context)
        return BatchWork(self._n_launched, n_streams=len(reqs), n_context=n_context)

    def launch_prefill(self, work: BatchWork, reqs: Iterable[Any] = ()) -> BatchWork:
        """Record the launch of a prefill.

        Args:
            work: its sizes, with any number.
            reqs: those that are prefilled.
        Returns:
            The same with its number.
        """
        self._n_launched += 1
        self._launched_prefill = self._n_launched
        if any(self.table.is_best_effort(req.rid) for req in reqs):
            self.best_effort.prefilled(work, self.now_s)
            self.table.changed = True
        return replace(work, number=self._n_launched)

    # --- decisions ---

    def decide(
        self,
        pool: Pool,
        *,
        prefill_running: bool,
        blocked: Iterable[str] = (),
        half: Collection[str] = (),
    ) -> Round:
        """The round's decision.

        Args:
            prefill_running: a prompt that cannot return to the queue is half-prefilled.
            blocked: requests that cannot step in this round.
            half: half-prefilled best-effort requests that can return to the queue.
        """
        if not len(self.table):
            self._last = _NOTHING
            self._managed = np.zeros(0, bool)
            return _NOTHING
        self.totals["rounds"] += 1
        young = self.now_s - self._decided_s < REVIEW_S
        if self._last is not _NOTHING and young and not self.table.changed:
            return self._last
        began_s = self._cpu_s()
        self._decided_s = self.now_s
        self.table.changed = False
        view = self._view(pool, prefill_running, blocked, half)
        self._last = decision = self._policy.decide(view)
        self.best_effort.cap = decision.cap or self.config.best_effort.cap_streams
        self._managed = view.managed.copy()
        self.best_effort.heard = bool(np.count_nonzero(view.managed))
        self._buffered_s = view.buffered_s
        for slot in self.table.record_urgency(decision.urgency).tolist():
            for rid in self.table.rids([slot]):
                self._record(rid, _CLASSES[decision.urgency[slot]], slot)
        self.totals["unknown"] += decision.n_unknown
        self.totals["stale"] += self.table.n_stale
        self.totals["decide_s"] += self._cpu_s() - began_s
        return decision

    def _view(
        self,
        pool: Pool,
        prefill_running: bool = False,
        blocked: Iterable[str] = (),
        half: Collection[str] = (),
    ) -> StageView:
        best_effort = self.table.best_effort(
            half,
            others_prefill=prefill_running,
            free_tokens=pool.free - pool.idle,
            pool_tokens=max(1, pool.total),
            last_prefill_s=self.best_effort.last_prefill_s,
            cap=self.best_effort.cap,
            cost=self.best_effort.cost,
        )
        return self.table.view(
            now_s=self.now_s,
            occupancy=pool.occupancy,
            kv_wanted=pool.wanted,
            free_tokens=pool.free,
            free_rows=pool.free_rows,
            prefill_running=prefill_running or bool(half),
            rates=self.rates,
            late_s=self.lateness.p99_s,
            blocked=blocked,
            last_prefill_s=self.last_prefill_s,
            decoded_since_prefill=self._launched_prefill < self._n_launched,
            best_effort=best_effort,
        )

    def retraction_order(
        self, pool: Pool, blocked: Iterable[str] = ()
    ) -> tuple[list[str], list[str]]:
        """Requests with KV as they are retracted where memory is short: of U2, and the others.

        Best effort is before the others.

        Args:
            blocked: requests whose input does not exist yet.
        """
        view = self._view(pool, blocked=blocked)
        well_buffered, others = self._policy.retraction_order(view)
        return self.table.rids(well_buffered.tolist()), self.table.rids(others.tolist())

    def spare(self, pool: Pool) -> list[str]:
        """Requests that are retracted for an urgent one that finds no room, in this order."""
        return self.table.rids(self._policy.spare(self._view(pool)).tolist())

    def retracted_first(self) -> list[str]:
        """Best-effort requests with KV in the order in which they give it up."""
        view = self._view(_NO_POOL)
        if view.best_effort is None:
            return []
        return self.table.rids(retracted_first(view).tolist())

    def requeue(self) -> list[str]:
        """Half-prefilled best-effort requests that return to the queue before this prefill."""
        if self._last.requeue is None:
            return []
        return self.table.rids(self._last.requeue.nonzero()[0].tolist())

    def admits_others(self) -> bool:
        """Whether the decision admits requests other than best effort."""
        first = self.table.rids(self._last.admit[:1].tolist())
        return any(not self.table.is_best_effort(rid) for rid in first)

    @property
    def last(self) -> Round:
        """The latest decision."""
        return self._last

    @property
    def urgent(self) -> bool:
        """Whether an urgent request can step or begin in this round."""
        return self._last.urgent

    @property
    def gap_at_s(self) -> float:
        """When the first listener hears a gap if this engine computes nothing; inf: none does."""
        return self._decided_s + self._last.until_gap_s

    def deadline_s(self) -> float:
        """Time by which this engine's next round should begin on a device that it shares."""
        first = self.urgent or self.table.has_new_listener()
        return engine_deadline_s(self.now_s, self.gap_at_s, first, self.config.arbiter)

    def pause(self, rid: str) -> bool:
        slot = self.table.slot(rid)
        return 0 <= slot < len(self._last.pause) and bool(self._last.pause[slot])

    def is_well_buffered(self, rid: str) -> bool:
        """Whether the request's consumer has enough speech buffered (class U2)."""
        slot = self.table.slot(rid)
        return 0 <= slot < len(self._last.urgency) and bool(self._last.urgency[slot] == U2)

    def slack_of(self, rids: Iterable[str]) -> float:
        """The time for which all of these requests could wait without being noticed; inf if all are
        best effort."""
        slack = slack_s(self._view(_NO_POOL), self.config.stage)
        least_s = math.inf
        for rid in rids:
            if not self.table.is_best_effort(rid):
                slot = self.table.slot(rid)
                least_s = min(least_s, 0.0 if slot < 0 else float(slack[slot]))
        return least_s

    def pauses_any(self) -> bool:
        """Whether the decision pauses any request."""
        return bool(self._last.pause.any())

    def admission_order(self, waiting: list) -> tuple[list, list]:
        """The waiting requests to try in this round, in order, and those that stay in the queue."""
        if self._last is _NOTHING:
            return waiting, []
        known, judged, new, later = len(self._last.pause), {}, [], []
        for req in waiting:
            slot = self.table.slot(req.rid)
            if 0 <= slot < known:
                judged[slot] = req
            elif self.table.is_best_effort(req.rid):
                later.append(req)
            else:
                new.append(req)  # arrived after the decision: SGLang's order, behind the others
        tried = [req for slot in self._last.admit.tolist() if (req := judged.pop(slot, None))]
        return tried + new, list(judged.values()) + later

    def prefill_budget(self) -> int | None:
        return self._last.prefill_budget

    def wait_limit_s(self) -> float:
        """Seconds until the decision changes with time alone."""
        if self._last is _NOTHING:
            return math.inf
        change_s = min(self._last.next_change_s, self.table.stale_at_s)
        if self._last.prefill_budget == 0:
            change_s = min(change_s, self._decided_s + REVIEW_S)
        return max(0.0, change_s - self.now_s)

    @property
    def config(self) -> PolicyConfig:
        return self._policy.config

    @property
    def tells_best_effort(self) -> bool:
        """Whether best-effort work is told from other work without listeners."""
        return self._policy.tells_best_effort

    @property
    def slices_prefill(self) -> bool:
        """Whether a shorter prompt may preempt a half-prefilled one."""
        return self._policy.order == "urgency"

    # --- accounts ---

    def paused(self, rid: str) -> None:
        self.table.pause(rid, self.now_s)
        if self.table.is_best_effort(rid):
            self.best_effort.paused()
            return
        self._record(rid, "paused", self.table.slot(rid))
        self.totals["pauses"] += 1

    def resumed(self, rid: str) -> None:
        if self.table.is_paused(rid):
            self.table.resume(rid, self.now_s)
            if self.table.is_best_effort(rid):
                return
            self._record(rid, "resumed", self.table.slot(rid))
            self.totals["resumes"] += 1

    def take_events(self) -> StreamEvents | None:
        """Events of single requests since the last call; None if there were none."""
        if not self._events:
            return None
        rids, what, buffered_s = map(list, zip(*self._events, strict=True))
        self._events = []
        return StreamEvents(rids, what, buffered_s)

    def _record(self, rid: str, what: str, slot: int) -> None:
        known = 0 <= slot < len(self._buffered_s)
        self._events.append((rid, what, float(self._buffered_s[slot]) if known else 0.0))

    def report(self) -> dict[str, float]:
        names = ("unknown_s", "u0_s", "u1_s", "u2_s")
        residence = dict(zip(names, self._residence_s.tolist(), strict=True))
        own = self.best_effort.report(self.table) if self._policy.tells_best_effort else {}
        return {**self.totals, **residence, **self._rates_ms(), **own}

    def _rates_ms(self) -> dict[str, float]:
        per_stream_s = self.rates.round_s_per_stream
        return {
            "busy": self.rates.busy,
            "round_ms": 1000 * self.rates.round_s,
            "late_ms": 1000 * self.lateness.p99_s,
            "round_ms_per_stream": 0.0 if math.isnan(per_stream_s) else 1000 * per_stream_s,
            "prefill_ms_fixed": 1000 * self.rates.prefill_s_fixed,
            "prefill_ms_per_token": 1000 * self.rates.prefill_s_per_token,
            "encoder_ms_per_audio_s": 1000 * self.rates.encoder_s_per_audio_s,
        }

    def _count_residence(self, passed_s: float) -> None:
        if passed_s < _LONGEST_ROUND_S:
            count = np.bincount(self._last.urgency[self._managed] + 1, minlength=4)
            self._residence_s += passed_s * count[:4]
