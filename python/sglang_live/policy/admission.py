"""Which waiting streams start now: the budget of KV tokens and rows, in the order of a policy.

Background work does not start while another stream is in need.

LiveServe stops at the first stream that does not fit. Here smaller streams behind it may pass, for
a limited time: KV that smaller streams always take at once would never add up to what it needs.
"""

from dataclasses import dataclass

import numpy as np

from sglang_live.policy.view import U1, Bools, Classes, Ints, StageView
from sglang_live.settings import Positive, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig(Settings):
    """
    max_bypass_s: how long smaller streams may pass a stream that does not fit.
    max_wait_s: a stream of U2, or one without a listener, that has waited for longer counts as U1;
        and if it waits for memory, pacing ceases, so that other streams end and free it.
    """

    max_bypass_s: Positive = 2.0
    max_wait_s: Positive = 10.0


def overdue(view: StageView, waiting: Ints, limit_s: float) -> Bools:
    """Returns which of the waiting streams have waited for longer than the limit."""
    return view.now_s - view.since_s[waiting] > limit_s


def in_turn(view: StageView, ordered: Ints, urgency: Classes, config: AdmissionConfig) -> Ints:
    """Returns `ordered` without background streams while another stream is in need."""
    if view.background is None or not np.count_nonzero(view.background[ordered]):
        return ordered
    put_off = view.background[ordered] & ~overdue(view, ordered, config.max_wait_s)
    in_need = urgency.view(np.uint8) <= U1  # UNKNOWN is 255 here
    running = in_need & view.managed & ~view.waiting
    if np.count_nonzero(running) or np.count_nonzero(in_need[ordered[~put_off]]):
        return ordered[~put_off]
    return ordered


def fitting(view: StageView, ordered: Ints, config: AdmissionConfig) -> tuple[Ints, float | None]:
    """
    Args:
        ordered: int64, waiting streams.
    Returns:
        The streams that are admitted, in the same order, and the longest time in seconds that one
        of the others has waited; None: all are admitted.
    """
    tokens = view.prefill_tokens[ordered]
    totals = tokens.cumsum()
    n_fit = min(int(totals.searchsorted(view.free_tokens, side="right")), max(view.free_rows, 0))
    if n_fit == len(ordered):
        return ordered, None
    left = view.free_tokens - (int(totals[n_fit - 1]) if n_fit else 0)
    rest = ordered[n_fit:]
    waited_s = view.now_s - view.since_s[rest]
    rows = view.free_rows - n_fit
    passing = _passing(tokens[n_fit:], waited_s > config.max_bypass_s, left, rows)
    refused = np.ones(len(rest), bool)
    refused[passing] = False
    refused_s = float(waited_s[refused].max())
    return np.concatenate((ordered[:n_fit], rest[passing])), refused_s


def _passing(tokens: Ints, blocks: Bools, left: int, rows: int) -> list[int]:
    """Positions that fit into `left`, up to the first that does not fit and blocks."""
    may_fit = tokens <= left
    blocked = np.flatnonzero(blocks & ~may_fit)
    end = int(blocked[0]) if len(blocked) else len(tokens)
    candidates = np.flatnonzero(may_fit[:end])
    passing: list[int] = []
    if not len(candidates):
        return passing
    smallest = int(tokens[candidates].min())
    for i, size, is_old in zip(
        candidates.tolist(), tokens[candidates].tolist(), blocks[candidates].tolist(), strict=True
    ):
        if left < smallest or len(passing) >= rows:
            break
        if size <= left:
            passing.append(i)
            left -= size
        elif is_old:
            break
    return passing
