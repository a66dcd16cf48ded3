"""GET /health: whether all stages serve, as the launcher reports it.

In: the state of each replica. Out: 200, or 503 with the states.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

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
