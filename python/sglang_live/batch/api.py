"""The few calls of the Batch API that the command needs.

In: a server's address and a key. Out: JSON objects and files.
A server that does not answer is asked again: its batches outlive it.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

_RETRY_S = 2.0
_RETRIED = (429, 502, 503, 504)
_READ_BYTES = 1 << 18


class BatchError(Exception):
    """The server refused a request; the message is that of the server."""


class Api:
    """offline: called with a reason each time that the server does not serve a request."""

    def __init__(self, url: str, key: str | None, offline: Callable[[str], None]):
        self._url, self._offline = url, offline
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # Uploads and results may be large; a connection that stands still ends.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=120)
        self._http = aiohttp.ClientSession(headers=headers, timeout=timeout)

    async def __aenter__(self) -> "Api":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def create(self, file: Path, endpoint: str) -> dict[str, Any]:
        """Upload a file and make its batch. Not repeated: it could be made twice."""
        try:
            with file.open("rb") as content:
                form = aiohttp.FormData({"purpose": "batch"})
                form.add_field("file", content, filename=file.name)
                uploaded = await self._json("POST", "/v1/files", data=form)
            body = {
                "input_file_id": uploaded["id"],
                "endpoint": endpoint,
                "completion_window": "24h",
            }
            return await self._json("POST", "/v1/batches", json=body)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BatchError(f"cannot reach {self._url}: {error or type(error).__name__}") from None

    async def batch(self, batch_id: str) -> dict[str, Any]:
        while True:
            try:
                return await self._json("GET", f"/v1/batches/{batch_id}")
            except (aiohttp.ClientError, TimeoutError) as error:
                self._offline(str(error) or type(error).__name__)
                await asyncio.sleep(_RETRY_S)

    async def save(self, file_id: str, path: Path) -> None:
        """Write the content of a file. `path` is complete or unchanged."""
        part = path.with_name(path.name + ".part")
        while True:
            try:
                await self._download(file_id, part)
                break
            except (aiohttp.ClientError, TimeoutError) as error:
                self._offline(str(error) or type(error).__name__)
                await asyncio.sleep(_RETRY_S)
        os.replace(part, path)

    async def _download(self, file_id: str, path: Path) -> None:
        async with self._http.get(f"{self._url}/v1/files/{file_id}/content") as response:
            await _check(response)
            with path.open("wb") as file:
                async for piece in response.content.iter_chunked(_READ_BYTES):
                    file.write(piece)

    async def _json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        async with self._http.request(method, self._url + path, **options) as response:
            await _check(response)
            found: dict[str, Any] = await response.json()
            return found


async def _check(response: aiohttp.ClientResponse) -> None:
    """
    Raises:
        BatchError: the server refused the request.
        aiohttp.ClientError: it cannot serve it now.
    """
    if response.status < 400:
        return
    if response.status in _RETRIED and response.method == "GET":
        response.raise_for_status()
    text = await response.text()
    try:
        text = (await response.json())["error"]["message"]
    except (aiohttp.ClientError, ValueError, KeyError, TypeError):
        text = text[:300]
    raise BatchError(f"HTTP {response.status}: {text}")
