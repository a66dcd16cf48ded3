"""When a prompt that is prefilled in slices makes way for shorter ones."""

from collections.abc import Sequence

from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.view import StageRates


def slice_tokens(rates: StageRates, config: PolicyConfig) -> int:
    """Tokens of one slice of a long prompt: what a request that comes meanwhile waits for."""
    return max(config.min_chunk_tokens, int(config.slice_s / max(rates.prefill_s_per_token, 1e-9)))


def passing(
    left: int, waiting: Sequence[int], *, idle_s: float, free: int, config: PolicyConfig
) -> list[int]:
    """Which of the waiting go before a half-prefilled prompt; none: it goes on.

    Args:
        left: its tokens to compute. waiting: those of the others, in the order of admission.
        idle_s: since its latest slice. It is passed for max_put_back_s at most.
        free: KV tokens beside what all half-prefilled prompts still need.
    Returns:
        indices of `waiting`.
    """
    if idle_s >= config.max_put_back_s:
        return []
    found = []
    for index, tokens in enumerate(waiting):
        if 2 * tokens <= left and tokens <= free:
            found.append(index)
            free -= tokens
    return found
