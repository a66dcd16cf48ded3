"""Proxy of SGLang's own HTTP API: listed routes only, checked requests, streamed responses.

In: HTTP requests on ROUTES. Out: the upstream's response, or a JSON error.
Owner: one NativeProxy per process, with one client session.
"""

import logging
from collections.abc import Awaitable
from contextlib import AsyncExitStack

import aiohttp
import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang_live.clock import MonotonicClock
from sglang_live.errors import LiveError
from sglang_live.gateway.errors import error_response
from sglang_live.gateway.flex.gate import FlexGate
from sglang_live.gateway.http.body import read_body, while_connected
from sglang_live.gateway.native.limits import NativeLimits
from sglang_live.gateway.native.names import RunningNames
from sglang_live.gateway.native.relay import Ending, Relay, model_info, server_info, unreachable
from sglang_live.gateway.native.request_check import CheckedRequest, RequestCheck
from sglang_live.gateway.native.routes import (
    GENERATING,
    MODEL_INFO,
    OPEN_SESSION,
    SERVER_INFO,
    returned,
)
from sglang_live.gateway.native.sessions import NativeSessions
from sglang_live.gateway.native.upstream import Upstream
from sglang_live.gateway.parts import GatewayParts
from sglang_live.kv.retention import RetentionConfig
from sglang_live.orchestrator.suspects import EngineRequest, digest

log = logging.getLogger(__name__)

_FILTERED = dict.fromkeys(SERVER_INFO, server_info) | dict.fromkeys(MODEL_INFO, model_info)
# The replica that serves SGLang's own API.
_NATIVE_ENGINE = "thinker/0"
# Fields that do not change what the engine computes: names, and the form of the response.
_NOT_CONTENT = ("rid", "stream", "stream_options", "user", "model", "cache_salt", "priority")


class NativeProxy:
    """Checks each request, sends it to the thinker, and returns or streams the response."""

    def __init__(self, parts: GatewayParts, native_url: str, limits: NativeLimits):
        self._parts = parts
        self._sessions = NativeSessions(
            parts.config.native.max_native_sessions_per_key,
            parts.config.native.max_native_sessions,
            MonotonicClock().now_s,
        )
        self._running = RunningNames()
        self._check = RequestCheck(parts, self._sessions, limits, self._running)
        self._upstream = Upstream(native_url, parts.config.native)

    async def close(self) -> None:
        await self._upstream.close()

    async def __call__(self, request: Request) -> Response:
        try:
            raw = await read_body(request, self._parts.config.inputs.max_body_bytes)
        except LiveError as error:
            return self._refused(request.scope["path"], error)
        return await self.pass_on(request, raw)

    async def pass_on(
        self,
        request: Request,
        raw: bytes,
        *,
        counted: bool = True,
        flex: FlexGate | None = None,
    ) -> Response:
        """Check a request and send it on.

        Args:
            raw: the body of the request.
            counted: whether its responses count for the limit of its key.
            flex: bound on flex requests; None: that of clients.
        """
        route = request.scope["path"]  # not request.url: Starlette builds it from the Host header
        owner = self._parts.keys.owner(request.headers)
        ending = Ending()
        async with AsyncExitStack() as held:
            try:
                self._check.sender(request, route)
                checked = await self._check.body(request, raw, owner)
                limit_s = None
                if checked.tier.flex:
                    gate = flex or self._parts.flex
                    await while_connected(request, held.enter_async_context(gate.place()))
                    held.callback(self._abort_unread, checked.names, ending)
                    limit_s = gate.config.run_s
                names = await self._running.take(checked.names)
                held.callback(self._free, names, ending)
                if route in GENERATING:
                    content = _content_of(route, checked.body)
                    running = self._parts.suspects.begin(_NATIVE_ENGINE, content)
                    held.callback(self._end, running, ending)
                if counted and checked.n_completions > 1:
                    # app.py counted one.
                    await self._parts.rate_limits.take(owner, checked.n_completions - 1)
            except LiveError as error:
                return self._refused(route, error)
            upstream = self._upstream.send(request, route, checked.body)
            if route == OPEN_SESSION:
                response = await self._open_session(upstream, checked, owner)
            elif route in _FILTERED:
                response = await _filtered(upstream, route)
            else:
                mine = held.pop_all()
                return Relay(upstream, route, self._parts.metrics, mine, ending, checked, limit_s)
        self._parts.metrics.proxied.labels(route, str(response.status_code)).inc()
        return response

    def _abort_unread(self, names: tuple[str, ...], ending: Ending) -> None:
        if ending.hung_up:
            # SGLang looks for lost connections of requests that wait every 4 s only.
            self._upstream.abort(names)

    def _free(self, names: list[str], ending: Ending) -> None:
        self._running.free(names, hung_up=ending.hung_up)

    def _end(self, running: EngineRequest, ending: Ending) -> None:
        self._parts.suspects.end(running, broken=ending.broken)

    async def _open_session(
        self, upstream: Awaitable[aiohttp.ClientResponse], checked: CheckedRequest, owner: str
    ) -> Response:
        """Open a session, bound it, and then return the response.

        The engine has confirmed the bounds when the client gets the response, so that no request of
        the session runs without them. A client that hangs up changes nothing. If the session cannot
        be bounded, it is closed again.
        """
        opened = False
        try:
            async with await upstream as response:
                body = await response.read()
            if response.status == 200:
                session_id = orjson.loads(body)
                if checked.retention is not None:
                    await self._bound(session_id, checked.retention)
                opened = True
                body = orjson.dumps(checked.session)
            passed_on = Response(body, response.status)
            passed_on.raw_headers += returned(response.headers)
            return passed_on
        except (aiohttp.ClientError, TimeoutError) as error:
            return unreachable(OPEN_SESSION, error)
        except LiveError as error:
            return error_response(error)
        finally:
            if not opened:
                self._sessions.close(owner, checked.session)

    async def _bound(self, session_id: str, retention: RetentionConfig) -> None:
        try:
            await self._parts.orchestrator.retain_native(session_id, retention)
        except LiveError as error:
            log.warning("native_not_bounded session=%s error=%r", session_id, error)
            await self._upstream.close_session(session_id)
            raise

    def _refused(self, route: str, error: LiveError) -> Response:
        self._parts.metrics.proxied.labels(route, str(error.http_status)).inc()
        return error_response(error)


def _content_of(route: str, body: bytes) -> bytes:
    """Hash of what the engine computes. body: checked JSON."""
    content = orjson.loads(body) if body else None
    if isinstance(content, dict):
        content = {name: value for name, value in content.items() if name not in _NOT_CONTENT}
    return digest(route.encode(), orjson.dumps(content, option=orjson.OPT_SORT_KEYS))


async def _filtered(upstream: Awaitable[aiohttp.ClientResponse], route: str) -> Response:
    """The fields of the upstream's response that clients may see."""
    try:
        async with await upstream as response:
            info = orjson.loads(await response.read())
    except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
        return unreachable(route, error)
    kept = _FILTERED[route](info) if isinstance(info, dict) else {}
    return JSONResponse(kept, response.status)
