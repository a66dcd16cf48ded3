"""SGLang's own HTTP API, passed through: listed routes only, streamed, guarded.

In: HTTP requests on ROUTES. Out: the upstream's answer as it comes, or a JSON error.
Owner: one NativeProxy per process, with one client session.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from uuid import uuid4

import aiohttp
import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from yarl import URL

from sglang_live.clock import MonotonicClock
from sglang_live.errors import BadInputError, LiveError, StageUnavailableError
from sglang_live.gateway.auth import Keys
from sglang_live.gateway.config import GatewayConfig
from sglang_live.gateway.http_body import read_body
from sglang_live.gateway.http_errors import error_response
from sglang_live.gateway.json_forms import broken_json
from sglang_live.gateway.media_guard import MediaGuard
from sglang_live.gateway.model import check_model
from sglang_live.gateway.native.answers import early_error, model_info, server_info, too_long
from sglang_live.gateway.native.checks import ParameterError
from sglang_live.gateway.native.control_tokens import without_control_tokens
from sglang_live.gateway.native.forms import forms
from sglang_live.gateway.native.limits import NativeLimits
from sglang_live.gateway.native.names import put_names, request_name, session_name
from sglang_live.gateway.native.sessions import IDLE_S, NativeSessions
from sglang_live.gateway.native_retention import take_retention
from sglang_live.gateway.owner import owner_salt
from sglang_live.gateway.rate_limits import RateLimits
from sglang_live.gateway.same_machine import ForeignPageError
from sglang_live.kv.retention import RetentionConfig
from sglang_live.orchestrator.session import Orchestrator
from sglang_live.orchestrator.suspects import Flight, Suspects, digest
from sglang_live.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

_CHAT = "/v1/chat/completions"
_OPEN_SESSION, _CLOSE_SESSION = "/open_session", "/close_session"
_ABORT, FLUSH, _HEALTH = "/abort_request", "/flush_cache", "/health_generate"
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
    _HEALTH: ("GET",),
    FLUSH: ("POST",),
    _OPEN_SESSION: ("POST",),
    _CLOSE_SESSION: ("POST",),
    _ABORT: ("POST",),
}
# Those by which a model answers: they count as answers.
ANSWERING = ("/generate", "/v1/chat/completions", "/v1/completions")
# Those that are charged; the health check has the model write a token.
LIMITED = (*ANSWERING, _HEALTH)
_TOLD_IN_PART = {
    "/server_info": server_info,
    "/get_server_info": server_info,
    "/model_info": model_info,
    "/get_model_info": model_info,
}
_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")
# The replica that serves SGLang's own API.
NATIVE_ENGINE = "thinker/0"
# Names, and how an answer is delivered: what is computed is the same.
_NOT_CONTENT = ("rid", "stream", "stream_options", "user", "model", "cache_salt")
_MODEL_ROUTES = ("/v1/chat/completions", "/v1/completions")
_UNNAMED_MODEL = "default"  # what SGLang takes for the model it has
# No others: SGLang takes ranks, routing keys and overrides from headers.
_FORWARDED = ("accept", "user-agent", "x-request-id", "traceparent", "tracestate")
# RFC 9110 section 7.6.1, and what this server sets itself.
_NOT_RETURNED = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "content-length",
        "set-cookie",
    )
)
_MAX_EARLY_BYTES = 1 << 20


class OperatorOnlyError(LiveError):
    code = "operator_key_required"
    http_status = 403


@dataclass(frozen=True, slots=True)
class _Checked:
    """body: what is sent on. n_answers: 0 where no model answers. session: the client's name."""

    body: bytes = b""
    n_answers: int = 0
    streams: bool = False
    session: str = ""
    retention: RetentionConfig | None = None


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
        clock = MonotonicClock()
        self._keys = Keys(config.api_keys)
        self._rate_limits = rate_limits or RateLimits(None, clock)
        self._forms = forms(limits or NativeLimits())
        self._sessions = NativeSessions(
            config.max_native_sessions_per_key, config.max_native_sessions, clock.now_s
        )
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
            return self._refused(request.scope["path"], error)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        return await self.pass_on(request, raw)

    async def pass_on(self, request: Request, raw: bytes) -> Response:
        """raw: the request's body, which was read already."""
        route = request.scope["path"]  # not the URL's, which Starlette makes of Host
        owner = self._keys.owner(request.headers)
        flight = None
        try:
            self._check_sender(request, route)
            checked = await self._check(request, route, raw, owner)
            if route in ANSWERING:
                flight = self._suspects.begin(NATIVE_ENGINE, content_of(route, checked.body))
            if checked.n_answers > 1:
                self._rate_limits.take(owner, checked.n_answers - 1)  # one was counted
        except LiveError as error:
            self._over(flight, False)
            return self._refused(route, error)
        upstream = self._send(request, route, checked.body)
        if route == _OPEN_SESSION:
            answer = await self._open(upstream, checked, owner)
        elif route in _TOLD_IN_PART:
            answer = await _in_part(upstream, route)
        else:
            end = lambda broken: self._over(flight, broken)  # noqa: E731
            return _Relay(upstream, route, self._metrics, end, checked.streams)
        self._metrics.proxied.labels(route, str(answer.status_code)).inc()
        return answer

    def _send(self, request: Request, route: str, body: bytes):
        """The one place where a checked body goes upstream."""
        headers = _forwarded(request.headers)
        headers["accept-encoding"] = "identity"  # bytes are passed on as they come
        if body:
            headers["content-type"] = "application/json"
        return self._session().request(
            request.method,
            URL(f"{self._base_url}{route}", encoded=True),
            headers=headers | self._key(),
            data=body or None,
            allow_redirects=False,
        )

    def _check_sender(self, request: Request, route: str) -> None:
        host = request.headers.get("host")
        if host is not None and not _HOST.fullmatch(host):
            raise ParameterError("Host", "must be a name, and a port if there is one.")
        is_foreign = request.headers.get("sec-fetch-site") == "cross-site"
        if is_foreign and (route == FLUSH or not self._config.api_keys):
            raise ForeignPageError("A page from elsewhere may not send this.")
        if route == FLUSH:
            known = self._config.operator_key
            if not known or not Keys((known,)).allow(request.headers):
                raise OperatorOnlyError("/flush_cache is for the holder of --operator-key.")

    def _over(self, flight: Flight | None, broken: bool) -> None:
        if flight is not None:
            self._suspects.end(flight, broken=broken)

    def _refused(self, route: str, error: LiveError) -> Response:
        self._metrics.proxied.labels(route, str(error.http_status)).inc()
        return error_response(error)

    async def _check(self, request: Request, route: str, raw: bytes, owner: str) -> _Checked:
        """Check and rewrite the body: what is sent on is exactly what was checked."""
        form = self._forms.get(route)
        if form is None:
            return _Checked()
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise broken_json(raw, error) from None
        if route in _MODEL_ROUTES:
            self._check_model(body)
        retention = None
        if route == _OPEN_SESSION:
            retention = take_retention(body, self._config.retention)
        try:
            asked = form(body)
        except RecursionError:
            raise BadInputError("Invalid request: nested too deep.") from None
        await self._guard.check(asked.body)
        sent, session = asked.body, ""
        if route == _CHAT:
            for name in ("messages", "tools"):
                if name in sent:
                    sent[name] = without_control_tokens(sent[name])
        if route in ANSWERING:
            if params := sent.get("session_params"):
                self._sessions.used(owner, params["id"])
            put_names(sent, owner)
            sent["cache_salt"] = owner_salt(owner)
        elif route == _ABORT:
            sent["rid"] = request_name(owner, sent["rid"])
        elif route == _OPEN_SESSION:
            session = sent.get("session_id") or uuid4().hex
            idle_s = sent.setdefault("timeout", IDLE_S)
            self._sessions.open(owner, session, idle_s)
            sent["session_id"] = session_name(owner, session)
        elif route == _CLOSE_SESSION:
            self._sessions.close(owner, sent["session_id"])
            sent["session_id"] = session_name(owner, sent["session_id"])
        streams = bool(sent.get("stream"))
        return _Checked(orjson.dumps(sent), asked.n_answers, streams, session, retention)

    def _check_model(self, body: object) -> None:
        model = body.get("model") if isinstance(body, dict) else None
        if model != _UNNAMED_MODEL:
            check_model(self._orchestrator, model)

    async def _open(self, upstream, checked: _Checked, owner: str) -> Response:
        """Open a session and bound it, and only then say so.

        The engine has confirmed the bound when the client gets its answer: no request that the
        client sends from then on runs without it. A client that hangs up changes nothing; if the
        bound cannot be had, the session is closed again.
        """
        opened = False
        try:
            async with await upstream as response:
                body = await response.read()
            if response.status == 200:
                session_id = orjson.loads(body)
                if checked.retention is not None:
                    await self._bound(session_id, checked.retention)
                opened, body = True, orjson.dumps(checked.session)
            answer = Response(body, response.status)
            answer.raw_headers += _returned(response.headers)
            return answer
        except (aiohttp.ClientError, TimeoutError) as error:
            return _unreachable(_OPEN_SESSION, error)
        except LiveError as error:
            return error_response(error)
        finally:
            if not opened:
                self._sessions.close(owner, checked.session)

    async def _bound(self, session_id: str, retention: RetentionConfig) -> None:
        try:
            await self._orchestrator.bound_native(session_id, retention)
        except LiveError as error:
            log.warning("native_not_bounded session=%s error=%r", session_id, error)
            await self._close_session(session_id)
            raise

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
            if (path := self._config.native_socket) is not None:
                connector = aiohttp.UnixConnector(path, limit=0, force_close=True)
            else:
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


async def _in_part(upstream, route: str) -> Response:
    try:
        async with await upstream as response:
            told = orjson.loads(await response.read())
    except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
        return _unreachable(route, error)
    kept = _TOLD_IN_PART[route](told) if isinstance(told, dict) else {}
    return JSONResponse(kept, response.status)


class _Relay(Response):
    """Passes an upstream response on, and hangs up when the client does.

    over: told at the end, with whether the upstream's connection broke.
    """

    def __init__(
        self,
        upstream,
        route: str,
        metrics: GatewayMetrics,
        over: Callable[[bool], None],
        streams: bool,
    ):
        self._upstream, self._over, self._streams = upstream, over, streams
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
        try:
            early = await self._early(response) if self._streams else b""
            fault = early_error(early.partition(b"\n\n")[0]) if response.status == 200 else None
            if response.status == 400:
                early += await response.read()
                fault = too_long(early)
            if fault is not None:
                self._metrics.proxied.labels(self._route, str(fault.http_status)).inc()
                await error_response(fault)(scope, receive, send)
                return
            self._metrics.proxied.labels(self._route, str(response.status)).inc()
            headers = _returned(response.headers)
            await send(
                {"type": "http.response.start", "status": response.status, "headers": headers}
            )
            if early:
                await send({"type": "http.response.body", "body": early, "more_body": True})
            async for chunk in response.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            response.close()

    async def _early(self, response: aiohttp.ClientResponse) -> bytes:
        """The first event: what SGLang refuses in it can still become the answer's status."""
        early = b""
        while b"\n\n" not in early and len(early) < _MAX_EARLY_BYTES:
            chunk = await response.content.readany()
            if not chunk:
                break
            early += chunk
        return early


def _unreachable(route: str, error: Exception) -> JSONResponse:
    log.warning("native_unreachable route=%s error=%r", route, error)
    return error_response(StageUnavailableError("SGLang's own API does not answer."))


def _returned(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in headers.items()
        if name.lower() not in _NOT_RETURNED
    ]


def _forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    # "Connection" may name headers that are meant for this hop only.
    for_this_hop = {name.strip().lower() for name in headers.get("connection", "").split(",")}
    return {
        name: headers[name] for name in _FORWARDED if name in headers and name not in for_this_hop
    }


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
