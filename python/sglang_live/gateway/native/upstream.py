"""The connection to the thinker that serves SGLang's own API.

In: requests that were checked. Out: the upstream's responses. Owner: one Upstream per NativeProxy.
"""

from contextlib import suppress

import aiohttp
from starlette.requests import Request
from yarl import URL

from sglang_live.gateway.config import GatewayConfig
from sglang_live.gateway.native.headers import forwarded


class Upstream:
    """base_url: its host is a name only where the config has a socket."""

    def __init__(self, base_url: str, config: GatewayConfig):
        self._base_url, self._config = base_url.rstrip("/"), config
        self._client: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._client:
            await self._client.close()

    def send(self, request: Request, route: str, body: bytes):
        """The one place where a checked body goes upstream."""
        headers = forwarded(request.headers)
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

    async def close_session(self, session_id: str) -> None:
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
