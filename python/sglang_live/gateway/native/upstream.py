"""The connection to the thinker that serves SGLang's own API.

In: checked requests. Out: the upstream's responses. Owner: one Upstream per NativeProxy.
"""

import asyncio
from collections.abc import Awaitable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import aiohttp
from starlette.requests import Request
from yarl import URL

from sglang_live.aio import background
from sglang_live.gateway.native.routes import forwarded
from sglang_live.settings import Count, Positive, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeConfig(Settings):
    """
    max_native_sessions_per_key: open sessions of SGLang's own API per key.
    max_native_sessions: the same for all keys together.
    native_api_key: key of SGLang's own API; None: it has no key.
    native_socket: Unix socket of SGLang's own API; None: its URL is reached by TCP.
    native_connect_timeout_s: seconds to connect to it.
    """

    max_native_sessions_per_key: Count = 16
    max_native_sessions: Count = 32
    native_api_key: str | None = None
    native_socket: str | None = None
    native_connect_timeout_s: Positive = 5.0


class Upstream:
    """Sends requests to the thinker.

    base_url: its host only has a meaning if the config names no Unix socket.
    """

    def __init__(self, base_url: str, config: NativeConfig):
        self._base_url = base_url.rstrip("/")
        self._config = config
        self._client: aiohttp.ClientSession | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        await asyncio.gather(*self._aborts)
        if self._client:
            await self._client.close()

    def send(self, request: Request, route: str, body: bytes) -> Awaitable[aiohttp.ClientResponse]:
        """Start a request with a checked body."""
        headers = forwarded(request.headers)
        headers["accept-encoding"] = "identity"  # the relay passes bytes on unchanged
        if body:
            headers["content-type"] = "application/json"
        # SGLang has no HEAD. The socket server leaves out the body of the response to one.
        method = "GET" if request.method == "HEAD" else request.method
        return self._session().request(
            method,
            URL(f"{self._base_url}{route}", encoded=True),
            headers=headers | self._key(),
            data=body or None,
            allow_redirects=False,
        )

    async def close_session(self, session_id: str) -> None:
        url, body = f"{self._base_url}/close_session", {"session_id": session_id}
        with suppress(aiohttp.ClientError, TimeoutError):
            async with self._session().post(url, json=body, headers=self._key()):
                pass

    def abort(self, names: Iterable[str]) -> None:
        """End these requests in the engine, without waiting for it."""
        for name in names:
            task = background(self._abort(name), "abort")
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _abort(self, name: str) -> None:
        with suppress(aiohttp.ClientError, TimeoutError):
            url = f"{self._base_url}/abort_request"
            async with self._session().post(url, json={"rid": name}, headers=self._key()):
                pass

    def _key(self) -> dict[str, str]:
        key = self._config.native_api_key
        return {"authorization": f"Bearer {key}"} if key else {}

    def _session(self) -> aiohttp.ClientSession:
        if self._client is None:
            timeout = aiohttp.ClientTimeout(
                total=None, sock_connect=self._config.native_connect_timeout_s
            )
            # The upstream may close an idle connection at the moment of the next POST, which would
            # then fail. A new connection within this machine costs little.
            connector: aiohttp.BaseConnector
            if (path := self._config.native_socket) is not None:
                connector = aiohttp.UnixConnector(path, limit=0, force_close=True)
            else:
                connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._client = aiohttp.ClientSession(
                connector=connector, timeout=timeout, auto_decompress=False
            )
        return self._client
