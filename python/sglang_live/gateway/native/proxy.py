"""SGLang's own HTTP API, passed through: listed routes only, streamed, guarded.

In: HTTP requests on ROUTES. Out: the upstream's answer as it comes, or a JSON error.
Owner: one NativeProxy per process, with one client session. What passes is in native/.
"""

import aiohttp
import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from sglang_live.clock import MonotonicClock
from sglang_live.errors import LiveError
from sglang_live.gateway.auth import Keys
from sglang_live.gateway.config import GatewayConfig
from sglang_live.gateway.errors import error_response
from sglang_live.gateway.http.body import read_body
from sglang_live.gateway.native.answers import model_info, server_info
from sglang_live.gateway.native.limits import NativeLimits
from sglang_live.gateway.native.relay import Relay, unreachable
from sglang_live.gateway.native.request_check import RequestCheck
from sglang_live.gateway.native.routes import ANSWERING, MODEL_INFO, OPEN_SESSION, SERVER_INFO
from sglang_live.gateway.native.running import RunningNames
from sglang_live.gateway.native.session_opening import SessionOpening
from sglang_live.gateway.native.sessions import NativeSessions
from sglang_live.gateway.native.upstream import Upstream
from sglang_live.gateway.rate_limits import RateLimits
from sglang_live.orchestrator.session import Orchestrator
from sglang_live.orchestrator.suspects import Flight, Suspects, digest
from sglang_live.telemetry.metrics import GatewayMetrics

_TOLD_IN_PART = dict.fromkeys(SERVER_INFO, server_info) | dict.fromkeys(MODEL_INFO, model_info)
# The replica that serves SGLang's own API.
NATIVE_ENGINE = "thinker/0"
# Names, and how an answer is delivered: what is computed is the same.
_NOT_CONTENT = ("rid", "stream", "stream_options", "user", "model", "cache_salt")


class NativeProxy:
    def __init__(
        self,
        native_url: str,
        config: GatewayConfig,
        metrics: GatewayMetrics,
        orchestrator: Orchestrator,
        suspects: Suspects | None = None,
        rate_limits: RateLimits | None = None,
        limits: NativeLimits | None = None,
    ):
        self._keys = Keys(config.api_keys)
        self._rate_limits = rate_limits or RateLimits(None, MonotonicClock())
        self._suspects = suspects or Suspects(MonotonicClock())
        self._config, self._metrics = config, metrics
        sessions = NativeSessions(
            config.max_native_sessions_per_key,
            config.max_native_sessions,
            MonotonicClock().now_s,
        )
        self._check = RequestCheck(config, orchestrator, sessions, limits or NativeLimits())
        self._running = RunningNames()
        self._upstream = Upstream(native_url, config)
        self._opening = SessionOpening(self._upstream, sessions, orchestrator)

    async def close(self) -> None:
        await self._upstream.close()

    async def __call__(self, request: Request) -> Response:
        try:
            raw = await read_body(request, self._config.max_body_bytes)
        except LiveError as error:
            return self._refused(request.scope["path"], error)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        return await self.pass_on(request, raw)

    async def pass_on(self, request: Request, raw: bytes) -> Response:
        """raw: the request's body, which was read already."""
        route = request.scope["path"]  # not the URL's, which Starlette makes of Host
        owner = self._keys.owner(request.headers)
        flight, names = None, []
        try:
            self._check.sender(request, route)
            checked = await self._check.body(route, raw, owner)
            names = await self._running.take(checked.names)
            if route in ANSWERING:
                flight = self._suspects.begin(NATIVE_ENGINE, content_of(route, checked.body))
            if checked.n_answers > 1:
                self._rate_limits.take(owner, checked.n_answers - 1)  # one was counted
        except LiveError as error:
            self._running.free(names)
            self._over(flight, False)
            return self._refused(route, error)
        upstream = self._upstream.send(request, route, checked.body)
        if route == OPEN_SESSION:
            answer = await self._opening.open(upstream, checked, owner)
        elif route in _TOLD_IN_PART:
            answer = await _in_part(upstream, route)
        else:

            def over(broken: bool, hung_up: bool) -> None:
                self._running.free(names, hung_up=hung_up)
                self._over(flight, broken)

            return Relay(upstream, route, self._metrics, over, checked.streams)
        self._metrics.proxied.labels(route, str(answer.status_code)).inc()
        return answer

    def _over(self, flight: Flight | None, broken: bool) -> None:
        if flight is not None:
            self._suspects.end(flight, broken=broken)

    def _refused(self, route: str, error: LiveError) -> Response:
        self._metrics.proxied.labels(route, str(error.http_status)).inc()
        return error_response(error)


def content_of(route: str, body: bytes) -> bytes:
    """Hash of what an engine is asked. body: JSON that was checked."""
    asked = orjson.loads(body) if body else None
    if isinstance(asked, dict):
        asked = {name: value for name, value in asked.items() if name not in _NOT_CONTENT}
    return digest(route.encode(), orjson.dumps(asked, option=orjson.OPT_SORT_KEYS))


async def _in_part(upstream, route: str) -> Response:
    try:
        async with await upstream as response:
            told = orjson.loads(await response.read())
    except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
        return unreachable(route, error)
    kept = _TOLD_IN_PART[route](told) if isinstance(told, dict) else {}
    return JSONResponse(kept, response.status)
