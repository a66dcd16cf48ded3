"""Limits on connections without a request, and on connections of one address.

In: connections when they open, get a request and close. Out: some of them closed, and counted.
Owner: one ConnectionGuard per process. uvicorn has no deadline for a first request, so its
protocol classes are extended here.
"""

import asyncio
import ipaddress
from collections import Counter
from dataclasses import dataclass
from typing import Any

import orjson
import prometheus_client
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_live.errors import LiveError
from sglang_live.gateway.errors import error_body, refuse
from sglang_live.settings import Count, Positive, Settings, flag

# Networks of IPv6 customers are usually a /64.
_IPV6_PREFIX = 64


class TooManyConnectionsError(LiveError):
    code = "too_many_connections"
    http_status = 429


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits(Settings):
    """
    max_sessions: of the server. Behind a proxy all clients have one address: each has a session,
        and loads its page.
    silent_per_address: connections of one address without a request; the oldest is closed for a
        new one, so that all clients behind one shared address can still connect.
    silent: connections without a request of all addresses.
    """

    max_connections_per_address: Count | None = flag(
        None,
        "open connections of one address, of IPv6 of one /64 network",
        unset="twice --max-sessions, at least 1024",
    )
    first_request_s: Positive = flag(
        10.0, "close a connection without complete headers of a request after this time"
    )
    max_sessions: int = 0
    silent_per_address: int = 128
    silent: int = 2048

    @property
    def per_address(self) -> int:
        return self.max_connections_per_address or max(1024, 2 * self.max_sessions)


class ConnectionGuard:
    """closed: counter by reason (`silent`, `crowded_out`, `too_many`)."""

    def __init__(self, limits: ConnectionLimits, closed: prometheus_client.Counter):
        self._limits = limits
        self._closed = closed
        self._open: Counter[str] = Counter()
        self._address: dict[Any, str] = {}
        # Oldest first, each with the timer that closes it.
        self._silent: dict[Any, asyncio.TimerHandle] = {}
        self._n_silent: Counter[str] = Counter()

    def protect(self, config: uvicorn.Config) -> None:
        """Make the protocol classes of `config` report to this guard; before the server starts."""
        if not config.loaded:
            config.load()
        config.http_protocol_class = _guarded_http(config.http_protocol_class, self)
        assert config.ws_protocol_class is not None, "uvicorn has no WebSocket library"
        config.ws_protocol_class = _guarded_socket(config.ws_protocol_class, self)

    def opened(self, connection: Any) -> None:
        address = _network(connection.transport)
        if self._open[address] >= self._limits.per_address and not self._crowd_out(address):
            self._closed.labels("too_many").inc()
            _refuse(connection.transport, self._limits.per_address)
            return
        self._address[connection] = address
        self._open[address] += 1

    def silent(self, connection: Any) -> None:
        """The connection has sent no request, or only a part of one."""
        address = self._address.get(connection)
        if address is None or connection in self._silent:
            return
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._limits.first_request_s, self._close, connection, "silent")
        self._silent[connection] = timer
        self._n_silent[address] += 1
        if self._n_silent[address] > self._limits.silent_per_address:
            self._crowd_out(address)
        elif len(self._silent) > self._limits.silent:
            self._crowd_out(None)

    def requested(self, connection: Any) -> None:
        """The connection has sent a request."""
        if (timer := self._silent.pop(connection, None)) is not None:
            timer.cancel()
            self._decrement(self._n_silent, self._address[connection])

    def closed(self, connection: Any) -> None:
        self.requested(connection)
        if (address := self._address.pop(connection, None)) is not None:
            self._decrement(self._open, address)

    def _crowd_out(self, address: str | None) -> bool:
        """Close the connection that has been silent longest. Returns False if there is none.

        address: None for all addresses.
        """
        for connection in self._silent:
            if address in (None, self._address[connection]):
                self._close(connection, "crowded_out")
                return True
        return False

    def _close(self, connection: Any, reason: str) -> None:
        self._closed.labels(reason).inc()
        self.closed(connection)
        connection.transport.abort()

    @staticmethod
    def _decrement(counts: Counter[str], address: str) -> None:
        counts[address] -= 1
        if not counts[address]:
            del counts[address]  # else every address ever seen would stay in memory


def _network(transport: asyncio.Transport) -> str:
    peer = transport.get_extra_info("peername")
    if not isinstance(peer, tuple):
        return ""
    address = ipaddress.ip_address(peer[0].partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))
    return str(address)


def _refuse(transport: asyncio.Transport, limit: int) -> None:
    error = TooManyConnectionsError(f"This address has {limit} connections open, its limit.")
    transport.write(raw_error_response("429 Too Many Requests", error))
    transport.close()


def raw_error_response(status: str, error: LiveError) -> bytes:
    """An HTTP response in the protocol's form of errors, for requests that reach no application."""
    body = orjson.dumps({"error": error_body(error)})
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


class InvalidRequestError(LiveError):
    code = "invalid_http_request"
    http_status = 400


def _guarded_http(base: type, guard: ConnectionGuard) -> type:
    class GuardedHttp(base):  # type: ignore[misc]  # uvicorn chooses the base at run time
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            guard.opened(self)
            guard.silent(self)

        def connection_lost(self, exc: Exception | None) -> None:
            guard.closed(self)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                guard.requested(self)
            elif not self.transport.is_closing():
                guard.silent(self)

        def handle_websocket_upgrade(self, *request: Any) -> None:
            guard.closed(self)
            super().handle_websocket_upgrade(*request)

        def send_400_response(self, msg: str) -> None:
            self.transport.write(raw_error_response("400 Bad Request", InvalidRequestError(msg)))
            self.transport.close()

    return GuardedHttp


def _guarded_socket(base: type, guard: ConnectionGuard) -> type:
    class GuardedSocket(base):  # type: ignore[misc]  # uvicorn chooses the base at run time
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            guard.opened(self)

        def connection_lost(self, exc: Exception | None) -> None:
            guard.closed(self)
            super().connection_lost(exc)

    return GuardedSocket


# --- guard of requests whose framing other servers on their way may read in another way ---


_MAX_HEADER_BYTES = 1 << 16


class HeadersTooLargeError(LiveError):
    code = "headers_too_large"
    http_status = 431


class Framing:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = _fault(scope["headers"]) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
            return
        await refuse(error, scope, receive, send, keep=False)


def _fault(headers: list[tuple[bytes, bytes]]) -> LiveError | None:
    # RFC 9112, 6.1: a request with two lengths may hide another one.
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
        return InvalidRequestError("Content-Length beside Transfer-Encoding is not accepted.")
    if sum(len(name) + len(value) for name, value in headers) > _MAX_HEADER_BYTES:
        return HeadersTooLargeError(f"The headers may have at most {_MAX_HEADER_BYTES} bytes.")
    return None
