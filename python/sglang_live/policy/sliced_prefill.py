"""Long prompts: prefilled in slices, and when shorter prompts preempt them.

Shortest remaining first, with two bounds. Shorter prompts pass a half-prefilled one for
max_preempt_s at most, then one slice of it goes first: so half-prefilled prompts together have
their share of the time, whatever comes. And the order among them counts their age, so that no
prompt is behind those that came long after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_live.policy.stage import StageConstants
from sglang_live.policy.view import StageRates
from sglang_live.settings import Positive, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicingConfig(Settings):
    """
    overhead: share of a slice that the fixed cost of a prefill takes.
    min_slice_s, max_slice_s: bounds of a slice's duration, which has min_chunk_tokens at least; a
        request that comes meanwhile waits for half of it on average.
    long_slices: a prompt of at most this many slices is computed in one go.
    max_preempt_s: how long shorter prompts pass a half-prefilled one before a slice of it is
        computed: it always has an eleventh of the time at least.
    """

    overhead: Positive = 0.33
    min_slice_s: Positive = 0.025
    max_slice_s: Positive = 0.1
    long_slices: Positive = 4.0
    max_preempt_s: Positive = 0.25

    def check(self) -> None:
        self.not_above("min_slice_s", "max_slice_s")


def slice_s(rates: StageRates, config: SlicingConfig) -> float:
    """Returns the duration of a slice: as short as the fixed cost of a prefill allows, because a
    request that comes meanwhile waits for its end."""
    efficient_s = rates.prefill_s_fixed / config.overhead
    return max(config.min_slice_s, min(efficient_s, config.max_slice_s))


def slice_tokens(rates: StageRates, stage: StageConstants, config: SlicingConfig) -> int:
    """Returns the tokens of one slice."""
    variable_s = slice_s(rates, config) - rates.prefill_s_fixed
    tokens = round(variable_s / max(rates.prefill_s_per_token, 1e-9))
    return max(stage.min_chunk_tokens, tokens)


def is_long(tokens: int, slice_tokens: int, config: SlicingConfig) -> bool:
    """Returns True if a prompt of this length is prefilled in slices of that length."""
    return tokens > config.long_slices * slice_tokens


def rank_s(since_s: float, left: int, rates: StageRates, config: SlicingConfig) -> float:
    """Returns the rank of a half-prefilled prompt; the one with the smallest rank is continued.

    A prompt that came later by more than the rest of this one takes, at its share of the time, is
    behind it.

    Args:
        since_s: time at which its prefill began.
        left: tokens to compute.
    """
    own_s = slice_s(rates, config)
    share = own_s / (own_s + config.max_preempt_s)
    return since_s + left * rates.prefill_s_per_token / share


def passing(
    left: int,
    waiting: Sequence[tuple[int, int]],
    *,
    idle_s: float,
    free: int,
    most: int,
    config: SlicingConfig,
) -> list[int]:
    """Selects the waiting prompts that go before a half-prefilled one in this round.

    Args:
        left: tokens of the half-prefilled prompt that are to compute.
        waiting: (tokens to compute, tokens held in the end) of the others, in the order of
            admission.
        idle_s: time since its latest slice.
        free: KV tokens beyond what half-prefilled and running requests will need.
        most: tokens to compute in this round; the first prompt may have more.
    Returns:
        Indices of `waiting`; none: the half-prefilled prompt is continued.
    """
    found: list[int] = []
    if idle_s >= config.max_preempt_s:
        return found
    for index, (tokens, needed) in enumerate(waiting):
        if 2 * tokens <= left and needed <= free and (tokens <= most or not found):
            found.append(index)
            free, most = free - needed, most - tokens
    return found
