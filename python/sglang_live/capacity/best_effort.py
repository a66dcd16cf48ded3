"""What the engines say of best-effort work: requests that get what listeners do not need.

In: gauges of the stages' load. Out: BestEffort, for those who decide how much more of it to give.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# Gauges of an engine that tells best-effort work from other work; others have none of them.
_RUNNING, _PAUSED, _WAITING = "policy_be_running", "policy_be_paused", "policy_be_waiting"
KV_TOKENS = "policy_be_kv_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class BestEffort:
    """Best-effort requests in the engines, as these said last.

    n_running: those that advance. n_waiting: those that wait, or are paused.
    """

    n_running: int
    n_waiting: int

    @staticmethod
    def of(loads: Iterable[Mapping[str, float]]) -> "BestEffort | None":
        """Of all engines together; None if none of them says it."""
        told = [load for load in loads if _RUNNING in load]
        if not told:
            return None
        n_waiting = sum(load.get(_PAUSED, 0.0) + load.get(_WAITING, 0.0) for load in told)
        n_running = sum(load[_RUNNING] for load in told)
        return BestEffort(n_running=int(n_running), n_waiting=int(n_waiting))


def used_share(load: Mapping[str, float]) -> float | None:
    """Used share of an engine's KV pool, without best-effort work; None: there is no pool.

    Best-effort work makes room for a session as soon as one needs it. The gauges are not all of one
    moment. An engine that does not tell its best-effort work counts all of it as used.
    """
    total = load.get("kv_tokens_total")
    if not total:
        return None
    return max(0.0, load["kv_tokens_used"] - load.get(KV_TOKENS, 0.0)) / total
