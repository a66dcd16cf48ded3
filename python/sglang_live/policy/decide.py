"""The decision of one round of one stage: StageView in, Round out.

Where memory is short, also who is retracted. The only entry point of the engines into policy/.
"""

import math
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from sglang_live.policy import deadline, fcfs, retraction, urgency
from sglang_live.policy.admission import fitting
from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.hybrid import BestEffortRound, retracted_first, without_best_effort
from sglang_live.policy.interval import decode_interval_s
from sglang_live.policy.pacing import (
    Marks,
    choose_paused,
    keep_company,
    lower,
    next_resume_s,
    pacing_marks,
    yield_marks,
)
from sglang_live.policy.policies import Order, Policies
from sglang_live.policy.protection import begun_within, prefill_budget, prefill_s, until_gap_s
from sglang_live.policy.view import U1, U2, Bools, Classes, Ints, Round, StageView


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPolicy:
    """What the policies decide in a round of one stage.

    order: order in which waiting streams are admitted.
    pacing: whether streams far ahead of their listener pause.
    hybrid, bros: whether best effort fits the listeners' slack, and has BROS's cap.
    """

    order: Order = "fcfs"
    pacing: bool = False
    hybrid: bool = False
    bros: bool = False
    config: PolicyConfig = field(default_factory=PolicyConfig)

    @classmethod
    def of(cls, policies: Policies, config: PolicyConfig | None = None) -> "RoundPolicy":
        """Without an order streams are admitted as they come."""
        return cls(
            order=policies.order or "fcfs",
            pacing=policies.pacing,
            hybrid=policies.hybrid,
            bros=policies.bros,
            config=config or PolicyConfig(),
        )

    @property
    def safe_s(self) -> float:
        """P_safe of this order."""
        config = self.config
        return config.critical_s if self.order == "deadline" else config.p_safe_s

    @property
    def tells_best_effort(self) -> bool:
        return self.hybrid or self.bros

    def decide(self, view: StageView) -> Round:
        if view.best_effort is None:
            return self._decide(view)
        others = self._decide(without_best_effort(view))
        return BestEffortRound(view, others, self.config, self.hybrid, self.bros).decide()

    def _decide(self, view: StageView) -> Round:
        classes, n_unknown = urgency.classify(view, self.safe_s)
        admitted, refused_s = self._admit(view, classes)
        has_kv = ~view.waiting
        if view.blocked is not None:
            has_kv &= ~view.blocked
        urgent = self._urgent(view, classes, has_kv, admitted)
        yields = self.order != "fcfs" and self._pays(view, urgent)
        # Streams that hold memory which others wait for are computed sooner, so that they end.
        crowded = refused_s is not None or view.kv_wanted
        marks = self._marks(view, refused_s, crowded=crowded, yields=yields)
        if marks is None:
            pause, next_change_s = np.zeros(len(view), bool), math.inf
        else:
            may_pause = classes == U2
            may_pause &= view.managed
            may_pause &= ~view.waiting
            pause = choose_paused(view, may_pause, marks)
            if not yields and np.count_nonzero(pause):
                pause = keep_company(view, pause, has_kv, marks, self.config)
            next_change_s = next_resume_s(view, pause, marks)
            if refused_s is not None and refused_s < self.config.max_wait_s:
                next_change_s = min(next_change_s, view.now_s + self.config.max_wait_s - refused_s)
        budget = None
        # Policies that keep buffers short also keep them sufficient.
        if self.order == "urgency" or self.pacing:
            limit_s = prefill_s(view, admitted, has_kv, self.config)
            admitted = begun_within(view, admitted, limit_s, self.config)
            # Free indices have no KV.
            decodes = bool(np.count_nonzero(has_kv & ~pause & (view.kv_tokens > 0)))
            budget = prefill_budget(view, admitted, limit_s, decodes, self.config)
        return Round(
            pause=pause,
            admit=admitted,
            prefill_budget=budget,
            urgency=classes,
            urgent=len(urgent) > 0,
            until_gap_s=until_gap_s(view, self.config),
            n_unknown=n_unknown,
            interval_s=(
                decode_interval_s(view, has_kv, self.config, crowded=crowded)
                if self.pacing
                else 0.0
            ),
            next_change_s=next_change_s,
        )

    def retraction_order(self, view: StageView) -> tuple[Ints, Ints]:
        """Streams with KV as they are retracted where memory is short: of U2, and the others.

        Best effort is before all others.
        """
        if view.best_effort is not None:
            first = retracted_first(view)
            of_u2, rest = self.retraction_order(without_best_effort(view))
            return np.concatenate((first, of_u2)), rest
        classes, _ = urgency.classify(view, self.safe_s)
        return retraction.retraction_order(view, classes, self.config)

    def spare(self, view: StageView) -> Ints:
        """Streams that are retracted for an urgent one that finds no room, in this order. Best
        effort has been retracted before."""
        view = without_best_effort(view)
        classes, _ = urgency.classify(view, self.safe_s)
        return retraction.spare(view, classes, self.safe_s, self.config)

    def _admit(self, view: StageView, classes: Classes) -> tuple[Ints, float | None]:
        if not np.count_nonzero(view.waiting):
            return np.zeros(0, np.int64), None
        if self.order == "fcfs":
            # SGLang itself stops at the first stream that does not fit.
            ordered = fcfs.order(view)
            return ordered, fitting(view, ordered, self.config)[1]
        rule = urgency if self.order == "urgency" else deadline
        ordered = rule.order(view, classes, self.config)
        return fitting(view, urgency.in_turn(view, ordered, classes, self.config), self.config)

    def _marks(
        self, view: StageView, refused_s: float | None, *, crowded: bool, yields: bool
    ) -> Marks | None:
        found = []
        # A whole turn of another user is worth more than speech that may be wasted.
        starving = refused_s is not None and refused_s >= self.config.max_wait_s
        if self.pacing and not starving:
            found.append(pacing_marks(view, self.safe_s, self.config, crowded=crowded))
        if yields:
            found.append(yield_marks(view, self.safe_s, self.config))
        return reduce(lower, found) if found else None

    @staticmethod
    def _urgent(view: StageView, classes: Classes, has_kv: Bools, admitted: Ints) -> Classes:
        """Returns the classes of the streams of U0 and U1 that can step or begin in this round."""
        may_go = has_kv.copy()
        may_go[admitted] = True
        may_go &= view.managed
        may_go &= classes.view(np.uint8) <= U1  # UNKNOWN is 255 here
        return classes[may_go]

    def _pays(self, view: StageView, urgent: Classes) -> bool:
        """Returns True if urgent streams gain from shorter rounds."""
        rounds = self.config.yield_rounds
        if view.rates.round_s_per_stream * rounds < 2.0 * self.config.flip_s:
            return False  # pausing and resuming costs more than the urgent streams gain
        return len(urgent) > 0 and view.rates.busy <= self.config.saturated
