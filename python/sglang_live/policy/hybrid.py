"""Best-effort work beside what is heard: as much as the listeners' buffers have time for.

After BROS (arXiv 2504.09590), which serves real-time and best-effort requests in one engine. There
a real-time request has the time of one token as slack, and best effort a cap on its batch. Here the
slack is a listener's buffer: seconds that are known. A round takes best effort as far as its
predicted duration, with the measured error of such predictions, fits a share of the smallest slack.
That bounds prompts, too, which a cap on the batch does not. All other decisions of a round are made
as if there were no best effort. BROS's cap is a policy of its own, alone or beside this one.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from sglang_live.policy.stage import StageConstants
from sglang_live.policy.view import U0, BestEffort, Bools, Ints, Round, StageView
from sglang_live.settings import Count, Positive, Settings

# A cap that has doubled to here bounds nothing any more.
_LARGEST_CAP = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class BestEffortConfig(Settings):
    """
    slack_share: share of the listeners' slack that a round with best effort in it may take.
    most_round_s: most that a round with best effort in it may take, also without listeners: one may
        come in any round, and waits for its end.
    first_sound_s: time in which a stream's first chunk is made beside best effort.
    patience_s: best effort that has waited for longer gets a step, unless a stream may fall silent;
        then it gets one after the max_pause_s of pacing.
    overdue_turns: of streams that wait for too long at once, this share gets a step in a round.
    first_error: error of predictions, before it is measured, where there are no listeners.
    growth_tokens: that each best-effort stream can decode beside the KV of idle sessions before one
        of them is retracted: a prefill for some dozens of decode rounds.
    cap_streams: BROS's smallest cap on best-effort streams in a batch.
    """

    slack_share: Positive = 0.75
    most_round_s: Positive = 0.1
    first_sound_s: Positive = 0.3
    patience_s: Positive = 2.0
    overdue_turns: Count = 8
    first_error: Positive = 0.5
    growth_tokens: Count = 64
    cap_streams: Count = 128


def without_best_effort(view: StageView) -> StageView:
    """The view of the other streams. Memory and rows that best effort holds count as free."""
    be = view.best_effort
    if be is None:
        return view
    others, holds = ~be.which, be.which & ~view.waiting
    n_tokens = int(view.kv_tokens[holds].sum())
    # Best-effort streams are like free indices.
    return replace(
        view,
        best_effort=None,
        free_tokens=view.free_tokens + n_tokens,
        free_rows=view.free_rows + int(np.count_nonzero(holds)),
        occupancy=max(0.0, view.occupancy - n_tokens / be.pool_tokens),
        prefill_running=be.others_prefill,
        waiting=view.waiting & others,
        paused=view.paused & others,
        managed=view.managed & others,
        started=view.started | be.which,
        buffered_s=np.where(be.which, np.inf, view.buffered_s),
        kv_tokens=np.where(be.which, 0, view.kv_tokens),
        background=None if view.background is None else view.background & others,
    )


def listeners_slack_s(
    view: StageView, stage: StageConstants, first_sound_s: float, max_startup_s: float
) -> float:
    """Returns for how long the listeners can do without this stage; inf: there is none.

    A stream before its first sound needs the rounds of its first chunk in the time that is left.
    One that takes much longer is stuck, or has no telemetry, and does not count. From that chunk on
    it has its buffer, also while the chunk is on its way to the listener.
    Unknown buffers cannot be protected.

    Args:
        first_sound_s: of BestEffortConfig. max_startup_s: of DeadlineConfig.
    """
    assert view.best_effort is not None
    heard = view.managed & ~view.best_effort.which
    if not np.count_nonzero(heard):
        return math.inf
    has_chunk = view.buffered_s >= stage.chunk_s
    playing = heard & (view.started | has_chunk) & ~view.waiting
    least_s = float(np.fmin.reduce(view.buffered_s, where=playing, initial=math.inf))
    slack_s = least_s - stage.latency_s(view.rates.round_s)
    starting = heard & ~(view.started | (has_chunk & ~view.waiting))
    if np.count_nonzero(starting):
        waited_s = view.now_s - view.arrived_s[starting]
        n_steps = stage.chunk_steps - view.buffered_s[starting] // stage.step_s
        left_s = first_sound_s - waited_s - n_steps * view.rates.round_s
        is_on_its_way = waited_s <= max_startup_s
        slack_s = float(np.fmin.reduce(left_s, where=is_on_its_way, initial=slack_s))
    return max(slack_s, 0.0)


def in_order(view: StageView, which: Bools) -> Ints:
    """Returns best-effort streams in the order in which they are served.

    The one whose batch expires first, then by age; streams with the same beginning of their prompt
    follow the oldest of them, so that it is computed once (HyGen, arXiv 2501.14808).
    """
    be = view.best_effort
    assert be is not None
    found = which.nonzero()[0]
    if len(found) < 2:
        return found
    return found[np.lexsort((view.arrived_s[found], be.group[found], be.deadline_s[found]))]


def retracted_first(view: StageView) -> Ints:
    """Returns best-effort streams with KV in the order in which they give it up.

    Half-prefilled and paused ones first, then running ones; of these the one that is served last.
    """
    be = view.best_effort
    assert be is not None
    found = (be.which & ~view.waiting).nonzero()[0]
    runs = ~(view.paused[found] | be.half[found])
    return found[np.lexsort((-view.arrived_s[found], -be.deadline_s[found], runs))]


@dataclass(frozen=True, slots=True)
class BestEffortRound:
    """Best-effort work of one round.

    Args:
        view: of all streams, with best effort among them.
        others: the round without it.
        slack_s: of listeners_slack_s().
        max_pause_s: of PacingConfig.
        fits: whether it has to fit the slack (policy `hybrid`).
        caps: whether its batch has BROS's cap (policy `bros`).
    """

    view: StageView
    others: Round
    slack_s: float
    max_pause_s: float
    stage: StageConstants
    config: BestEffortConfig
    fits: bool
    caps: bool

    def decide(self) -> Round:
        """The round with best effort in it."""
        view, others = self.view, self.others
        be, slack_s = self._be, self.slack_s
        runs = ~view.waiting & ~be.which & ~others.pause & (view.kv_tokens > 0)
        if view.blocked is not None:
            runs &= ~view.blocked
        pause, cap = self._decodes(runs, slack_s)
        admit, budget, requeue = others.admit, others.prefill_budget, None
        if len(admit) or be.others_prefill:
            requeue = be.half if budget != 0 else None
        else:
            admit = self._fitting(in_order(view, be.which & view.waiting))
            if len(admit) or np.count_nonzero(be.half):
                beside_heard = bool(np.count_nonzero(runs & view.managed))
                budget = self._prefill_tokens(admit, beside_heard, slack_s)
        return replace(
            others,
            pause=pause,
            admit=admit,
            prefill_budget=budget,
            requeue=requeue,
            cap=cap,
        )

    @property
    def _be(self) -> BestEffort:
        assert self.view.best_effort is not None
        return self.view.best_effort

    def _limit_s(self, slack_s: float, error: float) -> float:
        """The predicted duration that a round with best effort in it may have.

        A listener may come in any round, so all are bounded. The error of predictions is a margin;
        before it is measured they are not trusted at all beside listeners.
        """
        config = self.config
        limit_s = min(config.slack_share * slack_s, config.most_round_s)
        if math.isinf(error):
            return 0.0 if math.isfinite(slack_s) else limit_s / (1.0 + config.first_error)
        return limit_s / (1.0 + error)

    def _patience_s(self) -> float:
        """How long best effort may wait for one step. Longer while a stream may fall silent."""
        playing = self.others.urgency[~self.view.waiting]
        is_any_dry = np.count_nonzero(playing == U0)
        return self.max_pause_s if is_any_dry else self.config.patience_s

    def _decodes(self, runs: Bools, slack_s: float) -> tuple[Bools, int]:
        """Choose the streams that decode.

        Args:
            runs: bool [n], other streams that decode.
        Returns:
            bool [n], streams that pause, and the next cap.
        """
        view, be = self.view, self._be
        can = be.which & ~view.waiting & ~be.half
        if view.blocked is not None:
            can &= ~view.blocked
        found = can.nonzero()[0]
        limit_s, most = math.inf, len(found)
        if self.fits:
            limit_s = self._limit_s(slack_s, be.cost.decode_error)
        if self.caps:
            most = min(most, be.cap)
        n_others, context = int(np.count_nonzero(runs)), int(view.kv_tokens[runs].sum())
        all_context = context + int(view.kv_tokens[found].sum())
        round_s = float(be.cost.decode_s(n_others + len(found), all_context))
        if not len(found) or (most == len(found) and round_s <= limit_s):
            return self.others.pause, self._next_cap(round_s, slack_s)
        found, n_overdue = self._in_turn(found)
        costs_s = be.cost.decode_s(
            n_others + np.arange(1.0, len(found) + 1.0), context + view.kv_tokens[found].cumsum()
        )
        n_may = min(most, int(costs_s.searchsorted(limit_s, side="right")))
        if math.isinf(slack_s) and not n_others:
            n_may = max(n_may, 1)
        n_may = max(n_may, n_overdue)
        pause = self.others.pause.copy()
        pause[found[n_may:]] = True
        return pause, self._next_cap(float(costs_s[n_may - 1]) if n_may else 0.0, slack_s)

    def _in_turn(self, found: Ints) -> tuple[Ints, int]:
        """Streams with KV in the order in which they step, and how many of them have to.

        Not all overdue ones at once: streams that paused together would make one long round.
        """
        view, deadline_s = self.view, self._be.deadline_s
        was_paused = view.paused[found]
        overdue = was_paused & (view.since_s[found] <= view.now_s - self._patience_s())
        # Those that run go on: each pause and resume costs time.
        rank = was_paused * np.int8(2) - overdue * np.int8(3)
        ordered = found[np.lexsort((view.arrived_s[found], deadline_s[found], rank))]
        in_turn = math.ceil(len(found) / self.config.overdue_turns)
        return ordered, min(int(np.count_nonzero(overdue)), in_turn)

    def _next_cap(self, round_s: float, slack_s: float) -> int:
        """BROS: doubled in a round without urgent streams, and reset where a round is too long."""
        if round_s > slack_s:
            return self.config.cap_streams
        cap = self._be.cap
        return cap if self.others.urgent else min(2 * cap, _LARGEST_CAP)

    def _fitting(self, ordered: Ints) -> Ints:
        """Those of the waiting streams that find room beside the KV of idle sessions. One always
        may evict that, or none would ever run beside many sessions."""
        view, be = self.view, self._be
        free, needed = be.free_tokens, view.prefill_tokens[ordered]
        n_holding = int(np.count_nonzero(be.which & ~view.waiting))
        if be.free_tokens < view.free_tokens:
            # It is retracted where its decodes would evict them: not soon after it began.
            free -= n_holding * self.config.growth_tokens
            needed = needed + self.config.growth_tokens
        n_fit = int(needed.cumsum().searchsorted(free, "right"))
        return ordered[: n_fit if n_holding else max(n_fit, 1)]

    def _prefill_tokens(self, admit: Ints, beside_heard: bool, slack_s: float) -> int | None:
        """Tokens that a prefill of best effort alone may take; None: the engine's own chunk.

        Args:
            beside_heard: streams that are heard could decode in its place.
        """
        view, be, stage = self.view, self._be, self.stage
        tokens = math.inf
        if self.fits:
            first = int(be.half.argmax()) if np.count_nonzero(be.half) else int(admit[0])
            context = max(0, int(view.kv_tokens[first] - view.prefill_tokens[first]))
            audio_s = 0.0 if view.audio_s is None else float(view.audio_s[first])
            if beside_heard and not view.decoded_since_prefill:
                slack_s = min(slack_s, 0.0)  # prefills in a row would take all of it
            limit_s = self._limit_s(slack_s, be.cost.prefill_error)
            tokens = be.cost.tokens_within(limit_s, context, audio_s)
        if tokens >= stage.chunk_tokens:
            return None
        if tokens >= stage.min_chunk_tokens:
            return int(tokens)
        waits_since_s = be.last_prefill_s
        if len(admit):
            waits_since_s = max(waits_since_s, float(view.since_s[admit].min()))
        is_overdue = view.now_s - waits_since_s > self._patience_s()
        return stage.min_chunk_tokens if is_overdue or math.isinf(slack_s) else 0
