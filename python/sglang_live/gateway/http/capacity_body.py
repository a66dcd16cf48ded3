"""Response body of GET /v1/capacity."""

import math
from typing import Any

from sglang_live.capacity.control import Capacity


def capacity_body(now: Capacity) -> dict[str, Any]:
    """budget_share and saturates_in_s are null if they are unknown or infinite."""
    return {
        "object": "capacity",
        "sessions": {"open": now.n_sessions, "limit": now.limit, "more": now.n_more},
        "reason": now.why or None,
        "budget_share": _finite(now.share),
        "kv": {
            stage: {"share": share, "saturates_in_s": _finite(saturates_s)}
            for stage, (share, saturates_s) in now.pools.items()
        },
    }


def _finite(number: float | None) -> float | None:
    return None if number is None or math.isinf(number) else round(number, 3)
