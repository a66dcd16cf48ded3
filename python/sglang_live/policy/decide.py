"""The decision of one round of one stage: StageView in, Round out.

Where memory is short, also who is retracted. The only entry point of the engines into policy/.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from sglang_live.policy import deadline, urgency
from sglang_live.policy.admission import fitting, in_turn
from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.hybrid import (
    BestEffortRound,
    listeners_slack_s,
    retracted_first,
    without_best_effort,
)
from sglang_live.policy.pacing import (
    Marks,
    choose_paused,
    next_resume_s,
    pacing_marks,
    resume_mark_s,
)
from sglang_live.policy.policies import Order, Policies
from sglang_live.policy.prefill import begun_within, prefill_budget, prefill_s, until_gap_s
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
        return config.deadline.critical_s if self.order == "deadline" else config.urgency.p_safe_s

    @property
    def tells_best_effort(self) -> bool:
        return self.hybrid or self.bros

    def decide(self, view: StageView) -> Round:
        if view.best_effort is None:
            return self._decide(view)
        config = self.config
        first_sound_s = config.best_effort.first_sound_s
        max_startup_s = config.deadline.max_startup_s
        return BestEffortRound(
            view=view,
            others=self._decide(without_best_effort(view)),
            slack_s=listeners_slack_s(view, config.stage, first_sound_s, max_startup_s),
            max_pause_s=config.pacing.max_pause_s,
            stage=config.stage,
            config=config.best_effort,
            fits=self.hybrid,
            caps=self.bros,
        ).decide()

    def _decide(self, view: StageView) -> Round:
        config = self.config
        classes, n_unknown = urgency.classify(view, self.safe_s)
        admitted, refused_s = self._admit(view, classes)
        has_kv = ~view.waiting
        if view.blocked is not None:
            has_kv &= ~view.blocked
        urgent = self._urgent(view, classes, has_kv, admitted)
        # Streams that hold memory which others wait for are computed sooner, so that they end.
        crowded = refused_s is not None or view.kv_wanted
        marks = self._marks(view, refused_s, crowded=crowded)
        if marks is None:
            pause, next_change_s = np.zeros(len(view), bool), math.inf
        else:
            may_pause = classes == U2
            may_pause &= view.managed
            may_pause &= ~view.waiting
            pause = choose_paused(view, may_pause, marks)
            next_change_s = next_resume_s(view, pause, marks)
            max_wait_s = config.admission.max_wait_s
            if refused_s is not None and refused_s < max_wait_s:
                next_change_s = min(next_change_s, view.now_s + max_wait_s - refused_s)
        budget = None
        # Policies that keep buffers short also keep them sufficient.
        if self.order == "urgency" or self.pacing:
            limit_s = prefill_s(view, admitted, has_kv, config.stage)
            admitted = begun_within(view, admitted, limit_s, config.prefill)
            # Free indices have no KV.
            decodes = bool(np.count_nonzero(has_kv & ~pause & (view.kv_tokens > 0)))
            budget = prefill_budget(view, admitted, limit_s, decodes, config.stage, config.prefill)
        return Round(
            pause=pause,
            admit=admitted,
            prefill_budget=budget,
            urgency=classes,
            urgent=len(urgent) > 0,
            until_gap_s=until_gap_s(view, config.stage),
            n_unknown=n_unknown,
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
        return urgency.retraction_order(view, classes, self.config.urgency)

    def spare(self, view: StageView) -> Ints:
        """Streams that are retracted for an urgent one that finds no room, in this order. Best
        effort has been retracted before."""
        view = without_best_effort(view)
        classes, _ = urgency.classify(view, self.safe_s)
        low_s = resume_mark_s(view, self.safe_s, self.config.stage, self.config.pacing)
        return urgency.spare(view, classes, low_s, self.config.urgency)

    def _admit(self, view: StageView, classes: Classes) -> tuple[Ints, float | None]:
        if not np.count_nonzero(view.waiting):
            return np.zeros(0, np.int64), None
        config = self.config.admission
        if self.order == "fcfs":
            waiting = view.waiting.nonzero()[0]
            ordered = waiting[np.argsort(view.arrived_s[waiting], kind="stable")]
            # SGLang itself stops at the first stream that does not fit.
            return ordered, fitting(view, ordered, config)[1]
        if self.order == "urgency":
            ordered = urgency.order(view, classes, self.config.urgency, config.max_wait_s)
        else:
            ordered = deadline.order(view, classes, self.config.deadline, config.max_wait_s)
        return fitting(view, in_turn(view, ordered, classes, config), config)

    def _marks(self, view: StageView, refused_s: float | None, *, crowded: bool) -> Marks | None:
        config = self.config
        # A whole turn of another user is worth more than speech that may be wasted.
        starving = refused_s is not None and refused_s >= config.admission.max_wait_s
        if not self.pacing or starving:
            return None
        return pacing_marks(
            view, self.safe_s, config.stage, config.pacing, config.urgency, crowded=crowded
        )

    @staticmethod
    def _urgent(view: StageView, classes: Classes, has_kv: Bools, admitted: Ints) -> Classes:
        """Returns the classes of the streams of U0 and U1 that can step or begin in this round."""
        may_go = has_kv.copy()
        may_go[admitted] = True
        may_go &= view.managed
        may_go &= classes.view(np.uint8) <= U1  # UNKNOWN is 255 here
        return classes[may_go]
