"""Prompts that are long to prefill: in slices, and when they make way for shorter ones.

Shortest remaining first, but for two bounds. A half-prefilled prompt is passed for max_preempt_s
at most, then one slice of it goes first: so half-prefilled prompts together have a sixth of the
time, however many shorter ones come. And the order among them counts their age, so that no prompt
is behind those that came long after it.
"""

from collections.abc import Sequence

from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.view import StageRates


def slice_tokens(rates: StageRates, config: PolicyConfig) -> int:
    """Tokens of one slice: what a request that comes meanwhile waits for."""
    tokens = int(config.slice_s / max(rates.prefill_s_per_token, 1e-9))
    return max(config.min_chunk_tokens, tokens)


def is_long(tokens: int, rates: StageRates, config: PolicyConfig) -> bool:
    """Returns True if a prompt of this length is prefilled in slices."""
    return tokens > config.long_slices * slice_tokens(rates, config)


def rank_s(since_s: float, left: int, rates: StageRates, config: PolicyConfig) -> float:
    """Of half-prefilled prompts the one with the least goes on.

    Those that came later by more than what is left of it takes, at its share, are behind it.

    Args:
        since_s: when it was begun. left: tokens to compute.
    """
    share = config.slice_s / (config.slice_s + config.max_preempt_s)
    return since_s + left * rates.prefill_s_per_token / share


def passing(
    left: int,
    waiting: Sequence[tuple[int, int]],
    *,
    idle_s: float,
    free: int,
    most: int,
    config: PolicyConfig,
) -> list[int]:
    """Which of the waiting go before a half-prefilled prompt in this round; none: it goes on.

    Args:
        left: its tokens to compute.
        waiting: of each other, in the order of admission, tokens to compute and to hold in the end.
        idle_s: since its latest slice.
        free: KV tokens beside what the half-prefilled and the running will need.
        most: tokens to compute in this round; the first may have more.
    Returns:
        indices of `waiting`.
    """
    found: list[int] = []
    if idle_s >= config.max_preempt_s:
        return found
    for index, (tokens, needed) in enumerate(waiting):
        if 2 * tokens <= left and needed <= free and (tokens <= most or not found):
            found.append(index)
            free, most = free - needed, most - tokens
    return found
