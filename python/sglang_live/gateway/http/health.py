"""GET /health: whether all stages serve, as the launcher reports it.

In: the state of each replica. Out: 200, or 503 with the states.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang_live.capacity.control import Capacity
from sglang_live.gateway.draining import Drain

SERVING = "serving"


@dataclass(frozen=True, slots=True)
class Health:
    """replicas: state by stage and number, as in "thinker/0".

    The server is healthy if a replica of every stage is SERVING: sessions go to that one.
    """

    replicas: Mapping[str, str]

    @property
    def serving(self) -> bool:
        stages = {name.partition("/")[0] for name in self.replicas}
        up = {name.partition("/")[0] for name, state in self.replicas.items() if state == SERVING}
        return bool(stages) and stages == up


@dataclass(frozen=True, slots=True)
class HealthRoute:
    health: Callable[[], Health]
    drain: Drain

    async def __call__(self, _request: Request) -> Response:
        now = self.health()
        is_ok = now.serving and not self.drain.began.is_set()
        status = "ok" if is_ok else "draining" if self.drain.began.is_set() else "unavailable"
        return JSONResponse({"status": status, "stages": dict(now.replicas)}, 200 if is_ok else 503)


# --- response body of GET /v1/capacity ---


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
