"""The share of a thinker's time that listeners need: what best effort could have is the rest."""

from benchmark.hybrid.listeners import TPOT_S
from benchmark.hybrid.workload import Work
from sglang_live.extensions.planner.device_model.costs import EngineCosts


def needed_share(turns: list[Work], costs: EngineCosts, seconds: float) -> float:
    """Share of the time that turns need if each stream has one step per frame.

    Rounds that are shared cost less for each stream: this is the least that they take.
    """
    prefill_s = sum(
        costs.prefill_s(turn.prompt_tokens - turn.cached_tokens, turn.audio_s) for turn in turns
    )
    n_streams = sum(turn.output_tokens for turn in turns) * TPOT_S / seconds
    kv = sum((t.prompt_tokens + t.output_tokens / 2) * t.output_tokens for t in turns)
    kv_each = kv / max(1, sum(turn.output_tokens for turn in turns))
    round_s = costs.decode_s(round(n_streams), round(n_streams * kv_each))
    return prefill_s / seconds + round_s / TPOT_S
