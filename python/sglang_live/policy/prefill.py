"""How long a prefill may delay the decoding streams.

SGLang runs a prefill before any decode, and the stages of a device wait for each other's batches. A
long prefill silences every stream with a shorter buffer. So it is computed in slices that the
buffers cover; in between, decodes fill the buffers again.
"""

import math
from dataclasses import dataclass

import numpy as np

from sglang_live.policy.stage import StageConstants
from sglang_live.policy.view import Bools, Floats, Ints, StageView
from sglang_live.settings import Positive, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(Settings):
    """
    max_defer_s: how long a prefill, and each next slice of it, may wait for decodes. A quarter of a
        second more before a response is noticed less than a gap within one.
    defer_costs: nor, with a listener, longer than this multiple of what it takes: a prefill that is
        short beside its wait gives the decodes little, and its user waits for both.
    short_rounds: a prefill that takes at most this many decode rounds waits for one at most. It has
        to be computed in any case, and its effect is that of slightly longer rounds.
    min_share: of the time it has waited that a deferred slice may take, or of the time that its
        listener has waited already, so that prompts are computed also where decodes never have time
        to spare.
    unnoticed_s: prefills that begin in one round may take this long together: of prompts with a
        listener also where streams have no time to spare, because a first sound waits; of prompts
        without one no more, because a request may come meanwhile.
    """

    max_defer_s: Positive = 0.25
    defer_costs: Positive = 1.0
    short_rounds: Positive = 1.5
    min_share: Positive = 0.2
    unnoticed_s: Positive = 0.2


def prefill_s(view: StageView, admitted: Ints, has_kv: Bools, stage: StageConstants) -> float:
    """Returns the time that a prefill may take so that no listener hears a gap; inf: any.

    Args:
        has_kv: bool [n], streams that could step.
    """
    if not len(admitted) and not view.prefill_running:
        return math.inf
    if view.prefill_running and not stage.may_pause_prefill:
        return math.inf  # no decode can run before its end, so the sooner it ends the better
    may_run_dry = has_kv & view.managed
    if not len(admitted) or view.managed[admitted[0]]:
        # A stream that has not sounded cannot fall silent. But it is about to sound, and goes
        # before a prompt without a listener.
        may_run_dry &= view.started
    # fmin ignores nan: an unknown buffer cannot be protected.
    buffered_s = float(np.fmin.reduce(view.buffered_s, where=may_run_dry, initial=math.inf))
    return buffered_s - _needed_s(view, stage)


def begun_within(view: StageView, admitted: Ints, limit_s: float, config: PrefillConfig) -> Ints:
    """Returns the first of the admitted streams, whose prefills can begin within the limit.

    The encoder hears whole clips in the round in which their prompts begin. One prompt may begin in
    any case, if none is half-prefilled.
    """
    if not len(admitted):
        return admitted
    rates, unheard = view.rates, ~view.managed[admitted]
    costs_s, is_limited = view.prefill_tokens[admitted] * rates.prefill_s_per_token, unheard
    if view.audio_s is not None:
        audio_s = view.audio_s[admitted]
        costs_s = costs_s + audio_s * rates.encoder_s_per_audio_s
        is_limited = unheard | (audio_s > 0.0)
    # The budget decides whether the first one waits for the others. Short ones begin with it.
    unheard_s = math.inf if unheard[0] else limit_s
    unnoticed_s = config.unnoticed_s
    limits_s = np.where(unheard, min(unheard_s, unnoticed_s), max(limit_s, unnoticed_s))
    too_late = is_limited & (rates.prefill_s_fixed + np.cumsum(costs_s) > limits_s)
    if not view.prefill_running:
        too_late[0] = False
    return admitted[: int(np.argmax(too_late))] if too_late.any() else admitted


def prefill_budget(
    view: StageView,
    admitted: Ints,
    limit_s: float,
    decodes: bool,
    stage: StageConstants,
    config: PrefillConfig,
) -> int | None:
    """Returns the tokens that prefill may take within the limit.

    Args:
        admitted: of begun_within().
        limit_s: of prefill_s().
        decodes: a stream of this stage could step in this round.
    Returns:
        Tokens; 0: no prefill in this round, never for long; None: the engine's own chunk.
    """
    if math.isinf(limit_s):
        return None
    rates = view.rates
    slack_s = limit_s - _fixed_s(view, admitted)
    if slack_s >= stage.chunk_tokens * rates.prefill_s_per_token:
        return None
    # Where prefills are short, the measured cost of a token may be zero.
    in_time = int(slack_s / max(rates.prefill_s_per_token, 1e-9))
    budget = max(in_time, _short_tokens(view, admitted, stage, config))
    if budget >= stage.min_chunk_tokens:
        return budget
    # Without decodes in this round deferring has no use.
    if decodes and _deferred_s(view, admitted) <= _may_wait_s(view, admitted, stage, config):
        return 0
    share_s = config.min_share * max(config.max_defer_s, _listener_waited_s(view, admitted))
    return max(
        stage.min_chunk_tokens,
        min(int(share_s / max(rates.prefill_s_per_token, 1e-9)), stage.chunk_tokens),
    )


def slack_s(view: StageView, stage: StageConstants) -> Floats:
    """Returns [n], the time for which each stream could wait without being noticed: 0 if its user
    waits for the first sound, and for streams without a listener, or of unknown buffer."""
    left_s = view.buffered_s - _needed_s(view, stage)
    return np.where(view.managed & view.started & (left_s > 0), left_s, 0.0)


def until_gap_s(view: StageView, stage: StageConstants) -> float:
    """Returns the time after which the first listener would hear a gap if this stage computed
    nothing; inf: there is none whose buffer is known."""
    listens = view.managed & view.started
    buffered_s = float(np.fmin.reduce(view.buffered_s, where=listens, initial=math.inf))
    return max(0.0, buffered_s - _needed_s(view, stage))


def _needed_s(view: StageView, stage: StageConstants) -> float:
    """Returns the buffer with which a stream has to be in the next decode round."""
    return stage.latency_s(view.rates.round_s) + view.rates.round_s


def _fixed_s(view: StageView, admitted: Ints) -> float:
    """Cost of a prefill round that does not depend on its tokens: the encoder hears a whole clip
    in the round in which it begins."""
    rates = view.rates
    if view.audio_s is None or view.prefill_running or not len(admitted):
        return rates.prefill_s_fixed
    audio_s = float(view.audio_s[admitted[0]])
    return rates.prefill_s_fixed + audio_s * rates.encoder_s_per_audio_s


def _short_tokens(
    view: StageView, admitted: Ints, stage: StageConstants, config: PrefillConfig
) -> int:
    """Returns the tokens that are computed at once for a short prefill of a listener; 0 if it is
    not short, or if no decode round has run since the last prefill."""
    if not len(admitted) or view.prefill_running or not view.managed[admitted[0]]:
        return 0
    rates, short_s = view.rates, config.short_rounds * view.rates.round_s
    n_tokens = int(view.prefill_tokens[admitted[0]])
    if _fixed_s(view, admitted) + n_tokens * rates.prefill_s_per_token > short_s:
        return 0
    if not view.decoded_since_prefill:
        return 0
    return max(stage.min_chunk_tokens, int(short_s / max(rates.prefill_s_per_token, 1e-9)))


def _may_wait_s(
    view: StageView, admitted: Ints, stage: StageConstants, config: PrefillConfig
) -> float:
    """Returns how long a prefill may be deferred: what it takes by itself decides little for the
    decodes, however long it waits."""
    if view.prefill_running or not len(admitted) or not view.managed[admitted[0]]:
        return config.max_defer_s
    n_tokens = min(int(view.prefill_tokens[admitted[0]]), stage.chunk_tokens)
    cost_s = _fixed_s(view, admitted) + n_tokens * view.rates.prefill_s_per_token
    return min(config.max_defer_s, config.defer_costs * cost_s)


def _listener_waited_s(view: StageView, admitted: Ints) -> float:
    """Returns how long the first admitted stream has waited; 0 if it has no listener.

    Slices grow with this time. Otherwise a queue of first sounds would be computed at the smallest
    slice where buffers have no time to spare for long.
    """
    if not len(admitted) or not view.managed[admitted[0]]:
        return 0.0
    return view.now_s - float(view.since_s[admitted[0]])


def _deferred_s(view: StageView, admitted: Ints) -> float:
    """Returns how long prefill has waited: since the last one, or since there is one to do."""
    oldest_s = -math.inf if view.prefill_running else float(view.since_s[admitted].min())
    return view.now_s - max(oldest_s, view.last_prefill_s)
