"""A socket to /v1/realtime that goes on over another one when the network loses it.

In: events to send. Out: events of the server, each once and in order. The session must be
resumable; one that is not ends with its socket. A server that stops may leave it to others.
"""

import asyncio
import base64
import json
import time
from collections import deque
from collections.abc import Callable
from itertools import chain, repeat
from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus

from sglang_live.client import clip
from sglang_live.client.connection import (
    CONNECT_TIMEOUT_S,
    SessionError,
    SessionOptions,
    open_socket,
)

# Between two attempts to connect, at first and later.
_RETRY_S = (0.05, 0.1, 0.2, 0.5)
# Close code of a server that has no room, or no journal, at the moment.
_TRY_AGAIN_LATER = 1013
_NO_SERVER = (502, 503, 504)  # of a balancer, or of a server that stops
# Close code and reason of a server that stops, and has left the session to others.
_RESUME = (1012, "resume")
# Events for a server that has not read what was on its way: a minute of the microphone.
_MOST_KEPT = 3000
_BYTES_PER_MS = clip.SAMPLE_RATE_HZ * clip.BYTES_PER_SAMPLE // 1000


class ResumingSocket:
    def __init__(self, options: SessionOptions, heard_s: Callable[[], float]):
        """heard_s: audio that the user has heard of the newest item with audio."""
        self._options = options
        self._heard_s = heard_s
        self._resumable: dict[str, Any] | None = None
        self._last_id: str | None = None
        self._item_id: str | None = None  # the newest with audio
        self._n_got_bytes = 0  # of its audio
        self._n_known_bytes = 0  # that come again
        self._sent: deque[str] = deque(maxlen=_MOST_KEPT)
        self._n_sent = 0
        self._is_up = False
        self._came: deque[str] = deque()
        self._resuming: asyncio.Task[bool] | None = None

    async def open(self) -> None:
        """Raises SessionError if no server responds there, or the server refuses."""
        self._socket = await open_socket(self._options)
        self._is_up = True

    async def close(self) -> None:
        if self._resuming is not None:
            self._resuming.cancel()
        await self._socket.close()

    async def send(self, event: dict[str, Any]) -> None:
        """While the socket is lost, events wait. Raises ConnectionClosed at the session's end."""
        text = json.dumps(event)
        self._sent.append(text)
        self._n_sent += 1
        if self._is_up:
            try:
                await self._socket.send(text)
            except ConnectionClosed as closed:
                if not self._is_lost(closed):
                    raise
                self._begin_to_resume()

    async def recv(self) -> str:
        """Raises ConnectionClosed at the session's end."""
        while not self._came:
            if (resuming := self._resuming) is not None:
                # It goes on if this wait is cancelled.
                if not await asyncio.shield(resuming):
                    if not self._came:
                        await self._socket.recv()  # raises what has ended the session
                elif self._resuming is resuming:
                    self._resuming = None
                continue
            try:
                self._take(await self._socket.recv())
            except ConnectionClosed as closed:
                if not self._is_lost(closed):
                    raise
                self._begin_to_resume()
        return self._came.popleft()

    def _begin_to_resume(self) -> None:
        if self._is_up:
            self._is_up = False
            self._resuming = asyncio.create_task(self._resume())

    def _is_lost(self, closed: ConnectionClosed) -> bool:
        """Whether the session can go on: the network has failed, or the server says so."""
        end = closed.rcvd
        goes_on = end is None or (end.code, end.reason) == _RESUME
        return self._resumable is not None and goes_on

    async def _resume(self) -> bool:
        assert self._resumable is not None
        until_s = time.monotonic() + self._resumable["grace_ms"] / 1000
        wait_s = chain(_RETRY_S, repeat(_RETRY_S[-1]))
        while time.monotonic() < until_s:
            heard_ms = int(1000 * self._heard_s())
            at = {"after": self._last_id or "", "heard_ms": str(heard_ms)}
            at |= {"item_id": self._item_id} if self._item_id else {}
            try:
                socket = await open_socket(self._options, resume=self._resumable["token"], **at)
            except SessionError as error:
                refused = error.__cause__
                status = isinstance(refused, InvalidStatus) and refused.response.status_code
                if status and status not in _NO_SERVER:
                    return False
                await asyncio.sleep(next(wait_s))
                continue
            self._n_known_bytes = max(0, self._n_got_bytes - heard_ms * _BYTES_PER_MS)
            self._socket = socket
            refusals: list[str] = []
            try:
                return await self._go_on(socket, refusals)
            except ConnectionClosed as closed:
                # Lost once more, or refused for the moment; a used token is refused for good.
                code = closed.rcvd and closed.rcvd.code
                if self._is_lost(closed) or code == _TRY_AGAIN_LATER:
                    await asyncio.sleep(next(wait_s))
                    continue
            except TimeoutError:
                pass
            self._came.extend(refusals)
            return False
        return False

    async def _go_on(self, socket: ClientConnection, refusals: list[str]) -> bool:
        """Take what was missed, and send what the server has not read.

        refusals: gets the errors of a server that does not let the session go on.
        """
        event: dict[str, Any] = {}
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            while event.get("type") != "session.resumed":
                text = str(await socket.recv())
                event = json.loads(text)
                refusals.append(text)
                if event.get("type") != "error":  # nor were those before it refusals
                    for came in refusals:
                        self._take(came)
                    refusals.clear()
        n = event["events_received"]
        while n < self._n_sent:
            kept_from = self._n_sent - len(self._sent)
            if n < kept_from:
                return False
            await socket.send(self._sent[n - kept_from])
            n += 1
        self._is_up = True
        return True

    def _take(self, text: str | bytes) -> None:
        try:
            event = json.loads(text)
            self._last_id = event.get("event_id", self._last_id)
            if "session" in event:
                self._resumable = event["session"].get("resumable")
            if event["type"] == "response.output_audio.delta":
                event["delta"] = self._without_known(event["item_id"], event["delta"])
                text = json.dumps(event)
        except (ValueError, KeyError, TypeError, AttributeError):
            pass  # the reader of the event finds the fault
        self._came.append(str(text))

    def _without_known(self, item_id: str, delta: str) -> str:
        if item_id != self._item_id:
            self._item_id = item_id
            self._n_got_bytes = self._n_known_bytes = 0
        if not self._n_known_bytes:
            self._n_got_bytes += len(base64.b64decode(delta))
            return delta
        pcm = base64.b64decode(delta)
        n_known = min(self._n_known_bytes, len(pcm))
        self._n_known_bytes -= n_known
        self._n_got_bytes += len(pcm) - n_known
        return base64.b64encode(pcm[n_known:]).decode()
