"""What a StreamTable knows of best-effort requests."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BestEffortClass:
    """Of a best-effort request.

    Attributes:
        deadline_s: see policy.view.BestEffort.
        prefix: equal for requests whose prompts begin alike.
        prompt: int64 token ids that determine its KV; empty: no other request has the same KV.
    """

    deadline_s: float
    prefix: int
    prompt: bytes = b""


@dataclass(frozen=True, slots=True)
class BestEffortCounts:
    """Best-effort requests now, and the KV tokens that they hold.

    kv_tokens: what several share with the first of their group counts once.
    """

    running: int
    paused: int
    waiting: int
    kv_tokens: int
