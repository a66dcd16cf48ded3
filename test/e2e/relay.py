"""A relay between a client and a server, which records events and can break the connection.

In: sockets of clients. Out: sockets to a server, and every event that passed.
"""

import asyncio
import json
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import websockets
from pydantic import ValidationError
from websockets.exceptions import ConnectionClosed

from test.protocol import ServerEvents

DELTA = "response.output_audio.delta"
TRANSCRIPT = "response.output_audio_transcript.delta"


@dataclass
class Line:
    """One connection.

    asked: the client's events.
    came: the server's events.
    came_s: time at which each server event passed.
    faults: events that break the protocol's rules.
    is_broken: whether the relay has broken the connection.
    """

    asked: list[dict[str, Any]] = field(default_factory=list)
    came: list[dict[str, Any]] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)
    faults: list[Exception] = field(default_factory=list)
    is_broken: bool = False
    _rules: ServerEvents = field(default_factory=ServerEvents)

    def see(self, event: dict[str, Any]) -> None:
        self.came.append(event)
        self.came_s.append(time.monotonic())
        try:
            self._rules.see(event)
        except (AssertionError, ValidationError) as fault:
            self.faults.append(fault)

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.came if event["type"] == kind]

    def when(self, event: dict[str, Any]) -> float:
        return self.came_s[self.came.index(event)]


class Relay:
    """breaks: whether the relay breaks the first connection at its first audio."""

    def __init__(self, host: str, *, breaks: bool = False):
        self.lines: list[Line] = []
        self._host, self._breaks = host, breaks

    @asynccontextmanager
    async def listening(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
        """Yields host:port."""
        any_size = {"max_size": None, "compression": None}
        async with websockets.serve(self._serve, "127.0.0.1", 0, ssl=tls, **any_size) as server:
            host, port = server.sockets[0].getsockname()
            yield f"{host}:{port}"

    async def _serve(self, client: websockets.ServerConnection) -> None:
        line = Line()
        self.lines.append(line)
        headers = {"Authorization": client.request.headers.get("Authorization", "")}
        url = f"ws://{self._host}{client.request.path}"
        async with websockets.connect(
            url, additional_headers=headers, max_size=None, compression=None, proxy=None
        ) as server:
            ways = [self._up(client, server, line), self._down(client, server, line)]
            tasks = [asyncio.create_task(way) for way in ways]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _up(self, client, server, line: Line) -> None:
        with suppress(ConnectionClosed):
            async for frame in client:
                line.asked.append(json.loads(frame))
                await server.send(frame)

    async def _down(self, client, server, line: Line) -> None:
        with suppress(ConnectionClosed):
            async for frame in server:
                event = json.loads(frame)
                line.see(event)
                await client.send(frame)
                if self._breaks and event["type"] == DELTA:
                    self._breaks, line.is_broken = False, True
                    client.transport.abort()
                    return


def certificate(directory: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    cert, key = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
         "-keyout", key, "-out", cert, "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key
