"""One policy decision per scheduling round, from facts about the engine's requests.

In: the round's time and Progress (broadcast, so equal on all ranks), what the scheduler ran.
Out: a policy.view.Round; totals for the stage. Owner: one Rounds per scheduler process.
Imports nothing of SGLang. The only clock it reads is its thread's CPU time, to measure its cost.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from sglang_live.bridge.rate_meter import BatchWork
from sglang_live.bridge.stream_table import StreamTable
from sglang_live.engine_channel.messages import Progress, StreamEvents
from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.decide import RoundPolicy
from sglang_live.policy.policies import Policies
from sglang_live.policy.view import U0, U1, U2, Round, StageRates, StageView

_CLASSES = {U0: "u0", U1: "u1", U2: "u2", -1: "unknown"}
# A longer interval between two rounds is idle time: no stream was in a class for it.
_LONGEST_ROUND_S = 2.0
# Validity of a decision while no fact changes: a buffer changes by less than a frame in that time.
REVIEW_S = 0.015
_UNMEASURED = StageRates()


@dataclass(frozen=True, slots=True)
class LinkRate:
    """The measured link from host to device.

    Attributes:
        bytes_per_s: None before the first measurement.
        latency_s: duration of a small transfer.
    """

    bytes_per_s: float | None
    latency_s: float


@dataclass(frozen=True, slots=True)
class RoundStamp:
    """Rank 0's time and measurements, sent with the request broadcast: all ranks decide alike.

    Attributes:
        peer_urgent: a request of a later stage on this device is urgent.
        rates: of the batches whose results have arrived.
        n_done: number of the latest of them.
        prefill_done_s: arrival of the latest prefill's result.
    """

    now_s: float
    peer_urgent: bool = False
    rate: LinkRate = LinkRate(None, 0.0)
    rates: StageRates = _UNMEASURED
    n_done: int = 0
    prefill_done_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """KV tokens of the engine, and its free request rows.

    Attributes:
        free: KV tokens that a prefill could take now.
    """

    free: int
    total: int
    free_rows: int

    @property
    def occupancy(self) -> float:
        return 1.0 - self.free / self.total if self.total else 0.0


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
    if not decides_rounds(policies):
        return None
    if chunk_tokens and chunk_tokens > 0:
        least = min(chunk_tokens, config.min_chunk_tokens)
        config = replace(config, chunk_tokens=chunk_tokens, min_chunk_tokens=least)
    return Rounds(RoundPolicy.of(policies, config), cpu_s)


def decides_rounds(policies: Policies) -> bool:
    """Whether any of these policies decides about rounds; the others concern turns only."""
    return policies.order is not None or policies.pacing


class Rounds:
    def __init__(self, policy: RoundPolicy, cpu_s: Callable[[], float] = time.thread_time):
        self._policy, self._cpu_s = policy, cpu_s
        self.table = StreamTable(policy.config.step_s)
        self.rates = _UNMEASURED
        self.now_s = 0.0
        self._peer_urgent = False
        self.totals: dict[str, float] = dict.fromkeys(
            (
                "rounds",
                "decide_s",
                "pauses",
                "resumes",
                "unknown",
                "prefill_put_off",
                "decode_held",
            ),
            0.0,
        )
        self._residence_s = np.zeros(4)  # by class, unknown first
        self._n_launched = self._launched_prefill = 0
        self.last_prefill_s = self._decided_s = self._decoded_s = 0.0
        self._last: Round | None = None
        self._managed = np.zeros(0, bool)  # of the latest decision
        self._buffered_s = np.zeros(0)
        self._events: list[tuple[str, str, float]] = []

    # --- facts ---

    def stamp(self, stamp: RoundStamp) -> None:
        if self.now_s:
            self._count_residence(stamp.now_s - self.now_s)
        self.now_s, self.rates = stamp.now_s, stamp.rates
        in_flight = self._launched_prefill > stamp.n_done
        self.last_prefill_s = stamp.now_s if in_flight else stamp.prefill_done_s
        if stamp.peer_urgent != self._peer_urgent:
            self._peer_urgent, self.table.changed = stamp.peer_urgent, True

    def progress(self, news: Progress) -> None:
        began_s = self._cpu_s()
        self.table.progress(news, self.now_s)
        self.totals["decide_s"] += self._cpu_s() - began_s

    def launch_decode(self, reqs: list) -> BatchWork:
        """Record the launch of a decode round. reqs: the batch's own list."""
        self.table.step(reqs)
        self._n_launched += 1
        self._decoded_s = self.now_s
        return BatchWork(self._n_launched, n_streams=len(reqs))

    def launch_prefill(self, n_tokens: int, audio_s: float, n_pairs: int) -> BatchWork:
        """Record the launch of a prefill. The sizes are those of BatchWork."""
        self._n_launched += 1
        self._launched_prefill = self._n_launched
        return BatchWork(self._n_launched, n_tokens=n_tokens, audio_s=audio_s, n_pairs=n_pairs)

    # --- decisions ---

    def decide(
        self, pool: Pool, *, prefill_running: bool, blocked: Iterable[str] = ()
    ) -> Round | None:
        """The round's decision, or None while the table is empty.

        Args:
            blocked: requests that cannot step in this round.
        """
        if not len(self.table):
            self._last = None
            return None
        self.totals["rounds"] += 1
        young = self.now_s - self._decided_s < REVIEW_S
        if self._last is not None and young and not self.table.changed:
            return self._last
        began_s = self._cpu_s()
        self._decided_s, self.table.changed = self.now_s, False
        view = self._view(pool, prefill_running, blocked)
        self._last = decision = self._policy.decide(view)
        self._managed = view.managed.copy()
        self._buffered_s = view.buffered_s
        for slot in self.table.record_urgency(decision.urgency).tolist():
            for rid in self.table.rids([slot]):
                self._record(rid, _CLASSES[decision.urgency[slot]], slot)
        self.totals["unknown"] += decision.n_unknown
        self.totals["decide_s"] += self._cpu_s() - began_s
        return decision

    def _view(
        self, pool: Pool, prefill_running: bool = False, blocked: Iterable[str] = ()
    ) -> StageView:
        return self.table.view(
            now_s=self.now_s,
            occupancy=pool.occupancy,
            free_tokens=pool.free,
            free_rows=pool.free_rows,
            prefill_running=prefill_running,
            rates=self.rates,
            blocked=blocked,
            last_prefill_s=self.last_prefill_s,
            decoded_since_prefill=self._launched_prefill < self._n_launched,
            peer_urgent=self._peer_urgent,
        )

    def retraction_order(
        self, pool: Pool, blocked: Iterable[str] = ()
    ) -> tuple[list[str], list[str]]:
        """Requests with KV as they are retracted where memory is short: of U2, and the others.

        Args:
            blocked: requests whose input does not exist yet.
        """
        view = self._view(pool, blocked=blocked)
        well_buffered, others = self._policy.retraction_order(view)
        return self.table.rids(well_buffered.tolist()), self.table.rids(others.tolist())

    def spare(self, pool: Pool) -> list[str]:
        """Requests that are retracted for an urgent one that finds no room, in this order."""
        return self.table.rids(self._policy.spare(self._view(pool)).tolist())

    @property
    def last(self) -> Round | None:
        """The latest decision; None while the table is empty."""
        return self._last

    @property
    def urgent(self) -> bool:
        """Whether an urgent request can step or begin in this round."""
        return self._last is not None and self._last.urgent

    def pause(self, rid: str) -> bool:
        slot = self.table.slot(rid)
        if slot is None or self._last is None or slot >= len(self._last.pause):
            return False
        return bool(self._last.pause[slot])

    def is_well_buffered(self, rid: str) -> bool:
        """Whether the request's consumer has enough speech buffered (class U2)."""
        slot = self.table.slot(rid)
        if slot is None or self._last is None or slot >= len(self._last.urgency):
            return False
        return self._last.urgency[slot] == U2

    def pauses_any(self) -> bool:
        """Whether the decision pauses any request."""
        return self._last is not None and bool(self._last.pause.any())

    def admission_order(self, waiting: list) -> tuple[list, list]:
        """The waiting requests to try in this round, in order, and those that stay in the queue."""
        if self._last is None or len(waiting) < 1:
            return waiting, []
        known, judged, new = len(self._last.pause), {}, []
        for req in waiting:
            slot = self.table.slot(req.rid)
            if slot is not None and slot < known:
                judged[slot] = req
            else:
                new.append(req)  # arrived after the decision: SGLang's order, behind the others
        tried = [req for slot in self._last.admit.tolist() if (req := judged.pop(slot, None))]
        return tried + new, list(judged.values())

    def prefill_budget(self) -> int | None:
        return self._last.prefill_budget if self._last is not None else None

    def holds_decode(self) -> bool:
        """Whether the next decode round has to wait for the interval after the latest one."""
        held = self.now_s < self._due_s()
        self.totals["decode_held"] += held
        return held

    def _due_s(self) -> float:
        """Earliest time of the next decode round."""
        interval_s = self._last.interval_s if self._last is not None else 0.0
        return self._decoded_s + interval_s if interval_s else -math.inf

    def wait_limit_s(self, *, decodes: bool = False) -> float:
        """Seconds until the decision changes with time alone.

        Args:
            decodes: there are requests to decode, which a held round keeps waiting.
        """
        if self._last is None:
            return float("inf")
        change_s = self._last.next_change_s
        if decodes:
            change_s = min(change_s, max(self._due_s(), self.now_s))
        return max(0.0, change_s - self.now_s)

    @property
    def config(self) -> PolicyConfig:
        return self._policy.config

    @property
    def slices_prefill(self) -> bool:
        """Whether a shorter prompt may preempt a half-prefilled one."""
        return self._policy.order == "urgency"

    # --- accounts ---

    def paused(self, rid: str) -> None:
        self.table.pause(rid, self.now_s)
        self._record(rid, "paused")
        self.totals["pauses"] += 1

    def resumed(self, rid: str) -> None:
        if self.table.is_paused(rid):
            self.table.resume(rid, self.now_s)
            self._record(rid, "resumed")
            self.totals["resumes"] += 1

    def take_events(self) -> StreamEvents | None:
        """Events of single requests since the last call; None if there were none."""
        if not self._events:
            return None
        rids, what, buffered_s = map(list, zip(*self._events, strict=True))
        self._events = []
        return StreamEvents(rids, what, buffered_s)

    def _record(self, rid: str, what: str, slot: int | None = None) -> None:
        slot = self.table.slot(rid) if slot is None else slot
        known = slot is not None and slot < len(self._buffered_s)
        self._events.append((rid, what, float(self._buffered_s[slot]) if known else 0.0))

    def report(self) -> dict[str, float]:
        names = ("unknown_s", "u0_s", "u1_s", "u2_s")
        residence = dict(zip(names, self._residence_s.tolist(), strict=True))
        return {**self.totals, **residence, **self._rates_ms()}

    def _rates_ms(self) -> dict[str, float]:
        per_stream_s = self.rates.round_s_per_stream
        return {
            "busy": self.rates.busy,
            "round_ms": 1000 * self.rates.round_s,
            "round_ms_per_stream": 0.0 if math.isnan(per_stream_s) else 1000 * per_stream_s,
            "prefill_ms_fixed": 1000 * self.rates.prefill_s_fixed,
            "prefill_ms_per_token": 1000 * self.rates.prefill_s_per_token,
            "encoder_ms_per_audio_s": 1000 * self.rates.encoder_s_per_audio_s,
        }

    def _count_residence(self, passed_s: float) -> None:
        if self._last is not None and passed_s < _LONGEST_ROUND_S:
            count = np.bincount(self._last.urgency[self._managed] + 1, minlength=4)
            self._residence_s += passed_s * count[:4]
