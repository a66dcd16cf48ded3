"""The facts about an engine's requests, as arrays: the source of a policy's view.

In: arrivals, admissions, steps, pauses from the scheduler; HeardOfMany from the control channel.
Out: StageView. Owner: one StreamTable per scheduler process; equal on all ranks, because every
fact and the time come with the scheduler's broadcast.
A request keeps its slot to its end. A free slot has the values of a request that needs nothing.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from sglang_live.bridge.best_effort_facts import BestEffortClass, BestEffortCounts
from sglang_live.bridge.prompt_groups import PromptGroups, n_counted_again
from sglang_live.messages import HeardOfMany
from sglang_live.policy.view import BestEffort, StageRates, StageView

# A request's progress counts as lost after as many seconds of produced speech without any report,
# and when the latest one is as old: the gateway repeats it more often (interaction/monitor.py).
SILENT_CONSUMER_S = 4.0

# Urgency class of a request before its first round.
NO_CLASS = 99

_COLUMNS = {
    "waiting": (bool, False),
    "paused": (bool, False),
    "started": (bool, True),
    "managed": (bool, False),
    "background": (bool, False),
    "best_effort": (bool, False),
    "advancing": (bool, False),
    "reported": (bool, False),
    "since_s": (np.float64, 0.0),
    "arrived_s": (np.float64, 0.0),
    "heard_s": (np.float64, 0.0),
    "speed": (np.float64, 1.0),
    "stamp_s": (np.float64, 0.0),
    "could_step_s": (np.float64, 0.0),
    "produced": (np.float64, np.inf),
    "prompt_tokens": (np.int64, 0),
    "prefill_tokens": (np.int64, 0),
    "audio_s": (np.float64, 0.0),
    "deadline_s": (np.float64, np.inf),
    "group": (np.int64, 0),
    "shared_tokens": (np.int64, 0),
    "urgency": (np.int8, NO_CLASS),
}


class StreamTable:
    """
    Args:
        unit_s: seconds of speech that one decode step produces for this stage's consumer.
    Attributes:
        changed: whether a fact other than a step or the time has changed; the reader resets it.
        n_stale: requests of the latest view whose latest report is too old.
        stale_at_s: when the next one becomes so; inf: none does.
        waited_s: the longest time for which a request of the latest step could have stepped: since
            its own step before, or since it was admitted or resumed.
    """

    def __init__(self, unit_s: float, capacity: int = 64):
        self._unit_s = unit_s
        self._slot: dict[str, int] = {}
        self._rids: list[str | None] = []
        self._free: list[int] = []
        self._columns = {n: np.full(capacity, d, t) for n, (t, d) in _COLUMNS.items()}
        self._stepping: tuple[list | None, np.ndarray] = (None, np.zeros(0, np.int64))
        self._n_stepping_best_effort = 0
        self._groups = PromptGroups()
        self.changed = True
        self.n_stale = 0
        self.stale_at_s = math.inf
        self.waited_s = 0.0

    def __len__(self) -> int:
        return len(self._slot)

    def __contains__(self, rid: str) -> bool:
        return rid in self._slot

    def is_paused(self, rid: str) -> bool:
        return self._has("paused", rid)

    def is_managed(self, rid: str) -> bool:
        return self._has("managed", rid)

    def has_new_listener(self) -> bool:
        """Whether a request of a response that is heard, or leads to one, waits in the queue."""
        waits = self._columns["waiting"] & self._columns["managed"]
        return bool(np.count_nonzero(waits))

    @property
    def has_best_effort(self) -> bool:
        return bool(self._groups)

    def is_best_effort(self, rid: str) -> bool:
        return self._has("best_effort", rid)

    def _has(self, column: str, rid: str) -> bool:
        slot = self.slot(rid)
        return slot >= 0 and bool(self._columns[column][slot])

    def slot(self, rid: str) -> int:
        """The request's place in the view; -1: it is not in the table."""
        return self._slot.get(rid, -1)

    def rids(self, slots: Iterable[int]) -> list[str]:
        return [rid for slot in slots if (rid := self._rids[slot]) is not None]

    # --- from the scheduler ---

    def wait(
        self,
        rid: str,
        *,
        now_s: float,
        managed: bool,
        prompt_tokens: int,
        prefill_tokens: int,
        audio_s: float = 0.0,
        background: bool = False,
        best_effort: BestEffortClass | None = None,
    ) -> None:
        """Record a request that joins the queue, for the first time or after a retraction.

        Args:
            audio_s: seconds of audio that it has to encode.
            background: no consumer waits for it yet; see to_foreground().
            best_effort: None: it is not best-effort work, or no policy tells it from other work.
        """
        self.changed = True
        slot = self.slot(rid)
        if slot < 0:
            slot = self._take_slot(rid)
            for name in ("started", "advancing", "reported", "paused"):
                self._columns[name][slot] = False
            for name in ("heard_s", "produced"):
                self._columns[name][slot] = 0.0
            self._columns["speed"][slot] = 1.0
            self._columns["urgency"][slot] = NO_CLASS
            self._columns["prompt_tokens"][slot] = prompt_tokens
            self._columns["arrived_s"][slot] = now_s
            if best_effort is not None:
                self._columns["best_effort"][slot] = True
                self._columns["deadline_s"][slot] = best_effort.deadline_s
                group, n_shared = self._groups.of(best_effort.prefix, best_effort.prompt)
                self._columns["group"][slot] = group
                self._columns["shared_tokens"][slot] = n_shared
        row = {
            "waiting": True,
            "paused": False,
            "managed": managed,
            "background": background,
            "since_s": now_s,
            "prefill_tokens": prefill_tokens,
            "audio_s": audio_s,
        }
        for name, value in row.items():
            self._columns[name][slot] = value

    def admit(self, rid: str, now_s: float) -> None:
        if self._has("waiting", rid):
            slot = self._slot[rid]
            self.changed = True
            self._columns["waiting"][slot] = False
            self._columns["since_s"][slot] = now_s
            self._columns["prefill_tokens"][slot] = 0

    def to_foreground(self, rid: str) -> None:
        """Record that a response that will be heard waits for the request now."""
        if self._has("background", rid):
            slot = self._slot[rid]
            self.changed = True
            self._columns["background"][slot] = False
            self._columns["managed"][slot] = True

    def pause(self, rid: str, now_s: float) -> None:
        self._set_paused(rid, True, now_s)

    def resume(self, rid: str, now_s: float) -> None:
        self._set_paused(rid, False, now_s)

    def compacted(self, rid: str, n_tokens: int) -> None:
        """Record that n_tokens of a running request's KV were dropped."""
        if rid in self:
            self._columns["prompt_tokens"][self._slot[rid]] -= n_tokens

    def remove(self, rid: str) -> None:
        if rid not in self:
            return
        slot = self._slot.pop(rid)
        self.changed = True
        if self._columns["best_effort"][slot]:
            self._groups.leave(int(self._columns["group"][slot]))
        self._rids[slot] = None
        self._free.append(slot)
        self._stepping = (None, self._stepping[1])
        for name, (_, default) in _COLUMNS.items():
            self._columns[name][slot] = default

    def keep_only(self, rids: set[str]) -> None:
        for rid in self._slot.keys() - rids:
            self.remove(rid)

    def step(self, reqs: list, now_s: float) -> int:
        """Record that a decode step of these requests was launched.

        Args:
            reqs: the batch's own list.
        Returns:
            How many of them are best-effort work.
        """
        known, slots = self._stepping
        # A changed batch has a new list. A reference to the old one keeps its id from being reused.
        if known is not reqs:
            found = [self._slot[req.rid] for req in reqs if req.rid in self._slot]
            slots = np.asarray(found, np.int64)
            self._stepping = (reqs, slots)
            self._n_stepping_best_effort = int(self._columns["best_effort"][slots].sum())
        columns = self._columns
        columns["produced"][slots] += 1.0
        could_step_s = np.maximum(columns["could_step_s"][slots], columns["since_s"][slots])
        self.waited_s = now_s - float(could_step_s.min(initial=now_s))
        columns["could_step_s"][slots] = now_s
        return self._n_stepping_best_effort

    def record_urgency(self, urgency: np.ndarray) -> np.ndarray:
        """Record a round's classes. Returns the slots of managed requests whose class changed."""
        known = self._columns["urgency"][: len(urgency)]
        changed = urgency != known
        changed &= self._columns["managed"][: len(urgency)]
        slots = changed.nonzero()[0]
        known[slots] = urgency[slots]
        return slots

    # --- from the control channel ---

    def progress(self, news: HeardOfMany, now_s: float) -> None:
        self.changed = True
        slots = [self._slot.get(rid, -1) for rid in news.rids]
        at, columns = np.array(slots, np.int64), news.columns()
        if at.size and at.min() < 0:  # some requests have ended meanwhile
            live = at >= 0
            at, columns = at[live], {name: column[live] for name, column in columns.items()}
        for name, column in columns.items():
            self._columns[name][at] = column
        self._columns["stamp_s"][at] = now_s
        self._columns["reported"][at] = True

    # --- for the policies ---

    def view(
        self,
        *,
        now_s: float,
        occupancy: float,
        kv_wanted: bool = False,
        free_tokens: int,
        free_rows: int,
        prefill_running: bool,
        rates: StageRates,
        blocked: Iterable[str] = (),
        late_s: float = 0.0,
        last_prefill_s: float = 0.0,
        decoded_since_prefill: bool = True,
        best_effort: BestEffort | None = None,
    ) -> StageView:
        """The view of one round.

        Args:
            blocked: requests that cannot step in this round.
            late_s: of Lateness.
            best_effort: of best_effort().
        """
        n, columns = len(self._rids), self._columns
        buffered_s = self._buffered_s(now_s)
        produced = columns["produced"][:n]
        silent = self._silent(now_s, produced)
        if silent.any():
            buffered_s = np.where(silent, np.nan, buffered_s)
        stepped = np.where(np.isinf(produced), 0.0, produced)
        cannot_step = self._mask(blocked)
        if cannot_step is not None:
            columns["could_step_s"][:n][cannot_step] = now_s
        return StageView(
            now_s=now_s,
            occupancy=occupancy,
            kv_wanted=kv_wanted,
            free_tokens=free_tokens,
            free_rows=free_rows,
            prefill_running=prefill_running,
            rates=rates,
            late_s=late_s,
            waiting=columns["waiting"][:n],
            paused=columns["paused"][:n],
            since_s=columns["since_s"][:n],
            arrived_s=columns["arrived_s"][:n],
            buffered_s=buffered_s,
            started=columns["started"][:n] | columns["reported"][:n] | silent,
            kv_tokens=columns["prompt_tokens"][:n] + stepped.astype(np.int64),
            prefill_tokens=columns["prefill_tokens"][:n],
            audio_s=columns["audio_s"][:n],
            managed=columns["managed"][:n],
            background=columns["background"][:n],
            blocked=cannot_step,
            last_prefill_s=last_prefill_s,
            decoded_since_prefill=decoded_since_prefill,
            best_effort=best_effort,
        )

    def best_effort(self, half: Iterable[str], **facts: Any) -> BestEffort | None:
        """The view's best-effort streams; None: there is none.

        Args:
            half: those whose prompts are half-prefilled, and that can return to the queue.
            facts: fields of BestEffort that are not arrays.
        """
        if not self._groups:
            return None
        n, columns = len(self._rids), self._columns
        which, mask = columns["best_effort"][:n], self._mask(half)
        return BestEffort(
            which=which,
            half=np.zeros(n, bool) if mask is None else mask,
            deadline_s=columns["deadline_s"][:n],
            group=columns["group"][:n],
            **facts,
        )

    def best_effort_counts(self) -> BestEffortCounts:
        n, columns = len(self._rids), self._columns
        which, waiting = columns["best_effort"][:n], columns["waiting"][:n]
        holds = which & ~waiting
        n_paused = int(np.count_nonzero(holds & columns["paused"][:n]))
        tokens = columns["prompt_tokens"][:n][holds].sum() + columns["produced"][:n][holds].sum()
        tokens -= n_counted_again(columns["group"][:n][holds], columns["shared_tokens"][:n][holds])
        return BestEffortCounts(
            running=int(np.count_nonzero(holds)) - n_paused,
            paused=n_paused,
            waiting=int(np.count_nonzero(which & waiting)),
            kv_tokens=int(tokens),
        )

    def _mask(self, rids: Iterable[str]) -> np.ndarray | None:
        slots = [self._slot[rid] for rid in rids if rid in self._slot]
        if not slots:
            return None
        mask = np.zeros(len(self._rids), bool)
        mask[slots] = True
        return mask

    def _buffered_s(self, now_s: float) -> np.ndarray:
        n, columns = len(self._rids), self._columns
        produced_s = columns["produced"][:n] * self._unit_s
        speed, since_s = columns["speed"][:n], now_s - columns["stamp_s"][:n]
        left_s = (produced_s - columns["heard_s"][:n]) / speed - columns["advancing"][:n] * since_s
        # A consumer cannot take more than was produced: its buffer is empty then.
        return np.maximum(left_s, 0.0)

    def _silent(self, now_s: float, produced: np.ndarray) -> np.ndarray:
        """Which requests have lost their progress."""
        n, columns = len(self._rids), self._columns
        # A free slot has produced infinitely much and has no consumer.
        managed, stamp_s = columns["managed"][:n], columns["stamp_s"][:n]
        reported = columns["reported"][:n] & managed
        silent_s = np.where(reported, now_s - stamp_s, produced * self._unit_s)
        silent = managed & (silent_s > SILENT_CONSUMER_S)
        self.n_stale = int(np.count_nonzero(silent & reported))
        latest_s = stamp_s.min(where=reported & ~silent, initial=math.inf)
        self.stale_at_s = float(latest_s) + SILENT_CONSUMER_S
        return silent

    def _set_paused(self, rid: str, paused: bool, now_s: float) -> None:
        if rid in self:
            slot = self._slot[rid]
            self.changed = True
            self._columns["paused"][slot] = paused
            self._columns["since_s"][slot] = now_s

    def _take_slot(self, rid: str) -> int:
        if self._free:
            slot = self._free.pop()
            self._rids[slot] = rid
        else:
            slot = len(self._rids)
            self._rids.append(rid)
            if slot == len(self._columns["waiting"]):
                self._grow()
        self._slot[rid] = slot
        self._stepping = (None, self._stepping[1])
        return slot

    def _grow(self) -> None:
        for name, (dtype, default) in _COLUMNS.items():
            column = self._columns[name]
            more = np.full(len(column), default, dtype)
            self._columns[name] = np.concatenate((column, more))
