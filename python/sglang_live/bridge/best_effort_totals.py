"""What an engine's best-effort work has done, and the facts of it that the next round needs.

In: launches and moves, from rounds.py. Out: facts of a policy.view.BestEffort, gauges of the stage.
Owner: one BestEffortTotals per Rounds. Imports nothing of SGLang.
"""

import math

from sglang_live.bridge.batch_work import BatchWork
from sglang_live.bridge.stream_table import StreamTable
from sglang_live.policy.round_cost import RoundCost


class BestEffortTotals:
    """
    Attributes:
        cap: of the latest round (policy.view.Round).
        cost: what rounds take, as measured.
        last_prefill_s: launch of the latest prefill with best effort in it.
        heard: whether a listener has a stream in this round.
    """

    def __init__(self, cap: int):
        self.cap = cap
        self.cost = RoundCost()
        self.last_prefill_s = -math.inf
        self.heard = False
        self._totals = dict.fromkeys(
            (
                "be_decode_steps",
                "be_prefill_tokens",
                "be_slack_used_s",
                "be_pauses",
                "be_requeued",
                "be_retracted",
                "be_retracted_tokens",
            ),
            0.0,
        )

    def decoded(self, n_streams: int, n_best_effort: int, n_context: int) -> None:
        """Record a decode round. n_streams, n_context: of all its requests."""
        self._totals["be_decode_steps"] += n_best_effort
        if self.heard and n_streams > n_best_effort:
            # Their context is that of the average request.
            share = 1.0 - n_best_effort / n_streams
            with_s = float(self.cost.decode_s(n_streams, n_context))
            without_s = self.cost.decode_s(n_streams - n_best_effort, share * n_context)
            self._totals["be_slack_used_s"] += with_s - float(without_s)
        elif self.heard:
            self._totals["be_slack_used_s"] += float(self.cost.decode_s(n_streams, n_context))

    def prefilled(self, work: BatchWork, now_s: float) -> None:
        self.last_prefill_s = now_s
        self._totals["be_prefill_tokens"] += work.n_tokens
        if self.heard:
            context = work.n_context / max(work.n_tokens, 1)
            self._totals["be_slack_used_s"] += self.cost.prefill_s(
                work.n_tokens, context, work.audio_s, work.n_loaded
            )

    def paused(self) -> None:
        self._totals["be_pauses"] += 1

    def requeue(self) -> None:
        self._totals["be_requeued"] += 1

    def retracted(self, n_tokens: int) -> None:
        self._totals["be_retracted"] += 1
        self._totals["be_retracted_tokens"] += n_tokens

    def report(self, table: StreamTable) -> dict[str, float]:
        now = table.best_effort_counts()
        errors = [self.cost.decode_error, self.cost.prefill_error]
        return {
            **self._totals,
            "be_running": float(now.running),
            "be_paused": float(now.paused),
            "be_waiting": float(now.waiting),
            "be_kv_tokens": float(now.kv_tokens),
            # 0: not known yet.
            "round_error_p90": max((e for e in errors if math.isfinite(e)), default=0.0),
        }
