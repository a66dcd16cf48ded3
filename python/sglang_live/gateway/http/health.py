"""GET /health: whether all stages serve, as the launcher reports it.

In: the state of each stage. Out: 200, or 503 with the states.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang_live.gateway.draining import Drain

SERVING = "serving"


@dataclass(frozen=True, slots=True)
class Health:
    """stages: state by stage name; the server is healthy if every state is SERVING."""

    stages: Mapping[str, str]

    @property
    def serving(self) -> bool:
        return bool(self.stages) and all(state == SERVING for state in self.stages.values())


@dataclass(frozen=True, slots=True)
class HealthRoute:
    health: Callable[[], Health]
    drain: Drain

    async def __call__(self, _request: Request) -> Response:
        now = self.health()
        is_ok = now.serving and not self.drain.began.is_set()
        status = "ok" if is_ok else "draining" if self.drain.began.is_set() else "unavailable"
        return JSONResponse({"status": status, "stages": dict(now.stages)}, 200 if is_ok else 503)
