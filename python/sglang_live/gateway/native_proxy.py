"""SGLang's own HTTP API, passed through: listed routes only, streamed, guarded.

In: HTTP requests on ROUTES. Out: the upstream's answer as it comes, or a JSON error.
Owner: one NativeProxy per process, with one client session.
"""

import asyncio
import hashlib
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import aiohttp
import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from yarl import URL

from sglang_live.clock import MonotonicClock
from sglang_live.errors import BadInputError, LiveError, StageUnavailableError
from sglang_live.gateway.config import GatewayConfig
from sglang_live.gateway.http_body import read_body
from sglang_live.gateway.http_errors import error_response
from sglang_live.gateway.media_guard import MediaGuard
from sglang_live.gateway.model import check_model
from sglang_live.gateway.native_retention import take_retention
from sglang_live.kv.retention import RetentionConfig
from sglang_live.orchestrator.session import Orchestrator
from sglang_live.orchestrator.suspects import Flight, Suspects, digest
from sglang_live.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

_OPEN_SESSION, _ABORT = "/open_session", "/abort_request"
# An explicit list: SGLang also serves routes that load weights, profile or stop the engine.
ROUTES: Mapping[str, tuple[str, ...]] = {
    "/generate": ("POST", "PUT"),
    "/v1/chat/completions": ("POST",),
    "/v1/completions": ("POST",),
    "/v1/tokenize": ("POST",),
    "/v1/detokenize": ("POST",),
    "/get_model_info": ("GET",),
    "/model_info": ("GET",),
    "/get_server_info": ("GET",),
    "/server_info": ("GET",),
    "/health_generate": ("GET",),
    "/flush_cache": ("GET", "POST"),
    _OPEN_SESSION: ("GET", "POST"),
    "/close_session": ("GET", "POST"),
    _ABORT: ("POST",),
}
# Those by which a model answers: they count as answers.
ANSWERING = ("/generate", "/v1/chat/completions", "/v1/completions")
# The replica that serves SGLang's own API.
NATIVE_ENGINE = "thinker/0"
# Names, and how an answer is delivered: what is computed is the same.
_NOT_CONTENT = ("rid", "stream", "stream_options", "user", "metadata", "store", "model")
_MODEL_ROUTES = ("/v1/chat/completions", "/v1/completions")
_NATIVE_PREFIX = "native-"
_OWN_RID = re.compile(r"(?:native-)?[0-9a-f]{32}")
_UNNAMED_MODEL = "default"  # what SGLang takes for the model it has
# RFC 9110 section 7.6.1, and what the client library sets itself.
_NOT_FORWARDED = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
        "authorization",  # the gateway's key is not SGLang's
        "cookie",
    )
)


class NativeProxy:
    def __init__(
        self,
        native_url: str,
        config: GatewayConfig,
        metrics: GatewayMetrics,
        orchestrator: Orchestrator,
        suspects: Suspects | None = None,
    ):
        self._suspects = suspects or Suspects(MonotonicClock())
        self._base_url = native_url.rstrip("/")
        self._config = config
        self._metrics = metrics
        self._orchestrator = orchestrator
        self._guard = MediaGuard(config)
        self._client: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._client:
            await self._client.close()

    async def __call__(self, request: Request) -> Response:
        try:
            raw = await read_body(request, self._config.max_body_bytes)
        except LiveError as error:
            return self._refused(request, error)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        return await self.pass_on(request, raw)

    async def pass_on(self, request: Request, raw: bytes) -> Response:
        """raw: the request's body, which was read already."""
        route = request.url.path
        flight = None
        try:
            body, retention = await self._checked_body(request, raw)
            if route in ANSWERING:
                flight = self._suspects.begin(NATIVE_ENGINE, content_of(route, body))
        except LiveError as error:
            return self._refused(request, error)
        headers = _forwarded(request.headers)
        headers["accept-encoding"] = "identity"  # bytes are passed on as they come
        if body:
            headers["content-type"] = "application/json"
        headers |= self._key()
        # Encoded as it came: quoting it again would change it.
        url = URL(f"{self._base_url}{route}?{request.url.query}".removesuffix("?"), encoded=True)
        upstream = self._session().request(
            request.method, url, headers=headers, data=body or None, allow_redirects=False
        )
        if retention is not None:
            answer = await self._open_bounded(upstream, retention)
            self._metrics.proxied.labels(route, str(answer.status_code)).inc()
            return answer
        return _Relay(upstream, route, self._metrics, lambda broken: self._over(flight, broken))

    def _over(self, flight: Flight | None, broken: bool) -> None:
        if flight is not None:
            self._suspects.end(flight, broken=broken)

    def _refused(self, request: Request, error: LiveError) -> Response:
        self._metrics.proxied.labels(request.url.path, str(error.http_status)).inc()
        return error_response(error)

    async def _checked_body(
        self, request: Request, raw: bytes
    ) -> tuple[bytes, RetentionConfig | None]:
        """Check and rewrite the body: what is sent on is exactly what was checked."""
        if not raw:
            return b"", None
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise BadInputError(f"Invalid JSON: {error}") from None
        if request.url.path in _MODEL_ROUTES:
            self._check_model(body)
        if request.url.path == _ABORT and isinstance(body, dict) and body.get("abort_all"):
            raise BadInputError("abort_all would end the answers of everybody: name a rid.")
        if isinstance(body, dict):
            _name_apart(body)
        retention = None
        if request.url.path == _OPEN_SESSION:
            retention = take_retention(body, self._config.retention)
        await self._guard.check(body)
        try:
            return orjson.dumps(body), retention
        except orjson.JSONEncodeError as error:  # the reader goes deeper than the writer
            raise BadInputError(f"Invalid JSON: {error}") from None

    def _check_model(self, body: object) -> None:
        model = body.get("model") if isinstance(body, dict) else None
        if model != _UNNAMED_MODEL:
            check_model(self._orchestrator, model)

    async def _open_bounded(self, upstream, retention: RetentionConfig) -> Response:
        """Open a session and bound it, and only then say so.

        The engine has confirmed the bound when the client gets its answer: no request that the
        client sends from then on runs without it. A client that hangs up changes nothing; if the
        bound cannot be had, the session is closed again.
        """
        try:
            async with await upstream as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            return _unreachable(_OPEN_SESSION, error)
        if response.status == 200:
            session_id = orjson.loads(body)
            try:
                await self._orchestrator.bound_native(session_id, retention)
            except LiveError as error:
                log.warning("native_not_bounded session=%s error=%r", session_id, error)
                await self._close_session(session_id)
                return error_response(error)
        answer = Response(body, response.status)
        answer.raw_headers += _returned(response.headers)
        return answer

    async def _close_session(self, session_id: str) -> None:
        url, body = f"{self._base_url}/close_session", {"session_id": session_id}
        with suppress(aiohttp.ClientError, TimeoutError):
            async with self._session().post(url, json=body, headers=self._key()):
                pass

    def _key(self) -> dict[str, str]:
        key = self._config.native_api_key
        return {"authorization": f"Bearer {key}"} if key else {}

    def _session(self) -> aiohttp.ClientSession:
        if self._client is None:
            timeout = aiohttp.ClientTimeout(
                total=None, sock_connect=self._config.native_connect_timeout_s
            )
            # A connection that the upstream closes while it is idle would fail the next POST;
            # to the own machine a new one costs little.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._client = aiohttp.ClientSession(
                connector=connector, timeout=timeout, auto_decompress=False
            )
        return self._client


def content_of(route: str, body: bytes) -> bytes:
    """Hash of what an engine is asked. body: JSON that was checked."""
    asked = orjson.loads(body) if body else None
    if isinstance(asked, dict):
        asked = {name: value for name, value in asked.items() if name not in _NOT_CONTENT}
    return digest(route.encode(), orjson.dumps(asked, option=orjson.OPT_SORT_KEYS))


def _name_apart(body: dict[str, Any]) -> None:
    """Names of requests, as clients choose them, in a form of one length.

    SGLang aborts every request whose name begins with the one that is given: "think-" would be all
    callers' answers.
    """
    for holder in (body, body.get("session_params")):
        if isinstance(holder, dict) and "rid" in holder:
            rid = holder["rid"]
            holder["rid"] = [_apart(r) for r in rid] if isinstance(rid, list) else _apart(rid)


def _apart(rid: Any) -> Any:
    # SGLang's own names, and those that it got from here, come back in answers.
    if not isinstance(rid, str) or _OWN_RID.fullmatch(rid):
        return rid
    return _NATIVE_PREFIX + hashlib.sha256(rid.encode()).hexdigest()[:32]


class _Relay(Response):
    """Passes an upstream response on, and hangs up when the client does.

    over: told at the end, with whether the upstream's connection broke.
    """

    def __init__(self, upstream, route: str, metrics: GatewayMetrics, over: Callable[[bool], None]):
        self._upstream, self._over = upstream, over
        self._route = route
        self._metrics = metrics
        self._broke = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        relay = asyncio.create_task(self._relay(scope, receive, send))
        gone = asyncio.create_task(_until_disconnect(receive))
        try:
            await asyncio.wait({relay, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Cancelling closes the upstream connection, by which SGLang aborts the request.
            if not relay.done():
                self._metrics.proxied.labels(self._route, "disconnected").inc()
                relay.cancel()
            gone.cancel()
            await asyncio.gather(relay, gone, return_exceptions=True)
            failed = None if relay.cancelled() else relay.exception()
            self._over(self._broke or isinstance(failed, aiohttp.ClientError))
        if not relay.cancelled():
            relay.result()

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._upstream
        except (aiohttp.ClientError, TimeoutError) as error:
            self._broke = True
            answer = _unreachable(self._route, error)
            self._metrics.proxied.labels(self._route, str(answer.status_code)).inc()
            await answer(scope, receive, send)
            return
        self._metrics.proxied.labels(self._route, str(response.status)).inc()
        try:
            headers = _returned(response.headers)
            await send(
                {"type": "http.response.start", "status": response.status, "headers": headers}
            )
            async for chunk in response.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            response.close()


def _unreachable(route: str, error: Exception) -> JSONResponse:
    log.warning("native_unreachable route=%s error=%r", route, error)
    return error_response(StageUnavailableError("SGLang's own API does not answer."))


def _returned(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in headers.items()
        if name.lower() not in _NOT_FORWARDED
    ]


def _forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    # "Connection" may name further headers that are meant for this hop only.
    for_this_hop = {name.strip().lower() for name in headers.get("connection", "").split(",")}
    return {
        name: value
        for name, value in headers.items()
        if name.lower() not in _NOT_FORWARDED and name.lower() not in for_this_hop
    }


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
