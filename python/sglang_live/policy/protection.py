"""How long a prefill may keep the decoding streams waiting.

SGLang runs a prefill before any decode. A long one silences everybody whose buffer is shorter.
It is cut into slices that the buffers cover; between them, decodes fill the buffers again.
"""

import math

import numpy as np

from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.pacing import latency_s
from sglang_live.policy.view import StageView


def prefill_budget(
    view: StageView,
    admitted: np.ndarray,
    has_kv: np.ndarray,
    pause: np.ndarray,
    config: PolicyConfig,
) -> int | None:
    """Tokens after which the listener with the shortest buffer still hears no gap.

    Args:
        has_kv: bool [n], streams that could step.
        pause: bool [n], streams that do not, by decision.
    Returns:
        None: the engine's own chunk. 0: no prefill in this round; never for long.
    """
    if not len(admitted) and not view.prefill_running:
        return None
    if view.prefill_running and not config.may_pause_prefill:
        return None  # no decode can go before it is done: the sooner the better
    may_run_dry = has_kv & view.managed
    if not len(admitted) or view.managed[admitted[0]]:
        # Whoever has not begun to sound cannot fall silent. But it is about to begin, and goes
        # before what nobody will hear.
        may_run_dry &= view.started
    # fmin passes over nan: what is not known cannot be protected.
    buffered_s = float(np.fmin.reduce(view.buffered_s, where=may_run_dry, initial=math.inf))
    if math.isinf(buffered_s):
        return None
    rates = view.rates
    slack_s = buffered_s - latency_s(rates.round_s, config) - rates.round_s - rates.prefill_s_fixed
    if slack_s >= config.chunk_tokens * rates.prefill_s_per_token:
        return None
    budget = max(int(slack_s / rates.prefill_s_per_token), _short_tokens(view, admitted, config))
    if budget >= config.min_chunk_tokens:
        return budget
    # Deferring for decodes that do not happen would help nobody. Free indices have no KV.
    decodes = has_kv & ~pause & (view.kv_tokens > 0)
    if _deferred_s(view, admitted) <= config.max_defer_s and np.count_nonzero(decodes):
        return 0
    share_s = config.min_prefill_share * max(config.max_defer_s, _heard_waits_s(view, admitted))
    return max(
        config.min_chunk_tokens,
        min(int(share_s / max(rates.prefill_s_per_token, 1e-9)), config.chunk_tokens),
    )


def _short_tokens(view: StageView, admitted: np.ndarray, config: PolicyConfig) -> int:
    """What may be computed at once, because a listener waits for a prefill that takes about as long
    as a decode round, and decodes have had one since the last prefill; 0 otherwise."""
    if not len(admitted) or view.prefill_running or not view.managed[admitted[0]]:
        return 0
    rates, short_s = view.rates, config.short_rounds * view.rates.round_s
    n_tokens = int(view.prefill_tokens[admitted[0]])
    if rates.prefill_s_fixed + n_tokens * rates.prefill_s_per_token > short_s:
        return 0
    if view.now_s - view.last_prefill_s < 0.5 * rates.round_s:
        return 0
    return max(config.min_chunk_tokens, int(short_s / max(rates.prefill_s_per_token, 1e-9)))


def _heard_waits_s(view: StageView, admitted: np.ndarray) -> float:
    """How long the one who is next has waited; 0 if nobody listens to it.

    Slices that never grow would make a queue of those who begin wait one after the other, where
    buffers have no time to spare for long.
    """
    if not len(admitted) or not view.managed[admitted[0]]:
        return 0.0
    return view.now_s - float(view.since_s[admitted[0]])


def _deferred_s(view: StageView, admitted: np.ndarray) -> float:
    """How long prefill has waited: since the last one, or since there was one to do."""
    oldest_s = -math.inf if view.prefill_running else float(view.since_s[admitted].min())
    return view.now_s - max(oldest_s, view.last_prefill_s)
