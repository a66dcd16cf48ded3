"""Phone services as they speak to a server: a user who speaks, and a loudspeaker that plays.

What the server sends is played at the pace of time; marks come back when what is before them was.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import random
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from sglang_live.sound import g711

RATE_HZ, FRAME = 8_000, 160
_SILENCE = b"\xff"
# Of all services.
FRAMES = (
    '{"event": "start", "start": {"streamSid": "s", "callSid": "c", "call_control_id": "c"}}',
    '{"event": "media", "sequenceNumber": "4", "media": {"chunk": "3", "payload": "YWJj"}}',
    '{"event": "mark", "mark": {"name": "1"}}',
    '{"event": "dtmf", "dtmf": {"digit": "1"}}',
    "MEDIA_START connection_id:c format:ulaw optimal_frame_size:160",
    '{"event": "MEDIA_START", "connection_id": "c", "format": "ulaw"}',
    "DTMF_END digit:1",
)


def mutated_frame(rng: random.Random) -> str:
    frame = list(rng.choice(FRAMES))
    for _ in range(rng.randrange(4)):
        frame[rng.randrange(len(frame))] = rng.choice('{}[]":,x0\u2028')
    return "".join(frame)


class Service:
    """
    Attributes:
        played: µ-law that the user has heard, silence left out.
        n_clears: how often the server has dropped what waits.
        ran_dry: whether all was played before anything was dropped.
        longest_wait_s: of what was sent and not yet played.
        told: messages of the server, but for its media.
    """

    def __init__(self, socket: ClientConnection):
        self.socket = socket
        self.played = bytearray()
        self.n_clears = 0
        self.told: list[Any] = []
        self.waits: deque[bytes | str] = deque()  # frames of media, and marks between them
        self.ran_dry = False
        self.longest_wait_s = 0.0
        self._began_s, self._n_ticks = time.monotonic(), 0
        self._says = bytearray()
        self._n_sent = 0

    def say(self, pcm: np.ndarray) -> None:
        """pcm: int16 at 8 kHz."""
        self._says += g711.mulaw_encode(pcm).tobytes()

    def sound(self) -> np.ndarray:
        """What was played, [n] int16 at 8 kHz."""
        return g711.mulaw_decode(np.frombuffer(bytes(self.played), np.uint8))

    async def until_played(self, least_s: float, patience_s: float = 30.0) -> None:
        async with asyncio.timeout(patience_s):
            while len(self.played) < least_s * RATE_HZ:
                await asyncio.sleep(0.02)

    async def begin(self) -> None:
        raise NotImplementedError

    async def press(self, digit: str) -> None:
        raise NotImplementedError

    async def send_media(self, raw: bytes, n: int) -> None:
        raise NotImplementedError

    async def marked(self, name: str) -> None:
        """Audio before a mark was played, or dropped."""

    async def end(self) -> None:
        """The user hangs up."""

    async def take(self, frame: str | bytes) -> None:
        raise NotImplementedError

    def media(self, raw: bytes) -> None:
        self.waits += [raw[at : at + FRAME] for at in range(0, len(raw), FRAME)]
        n = sum(isinstance(one, bytes) for one in self.waits)
        # On a busy machine the loudspeaker is late, and takes more at once.
        late_s = time.monotonic() - self._began_s - 0.02 * self._n_ticks
        self.longest_wait_s = max(self.longest_wait_s, 0.02 * n - late_s)

    async def clear(self) -> None:
        self.n_clears += 1
        marks = [one for one in self.waits if isinstance(one, str)]
        self.waits.clear()
        for name in marks:
            await self.marked(name)

    async def _speak(self) -> None:
        self._began_s = time.monotonic()
        while True:
            self._n_ticks = n = self._n_ticks + 1
            await asyncio.sleep(max(0.0, self._began_s + 0.02 * n - time.monotonic()))
            said = bytes(self._says[:FRAME]).ljust(FRAME, _SILENCE)
            del self._says[:FRAME]
            await self.send_media(said, n)
            while self.waits and isinstance(self.waits[0], str):
                await self.marked(self.waits.popleft())
            if self.waits:
                self.played += self.waits.popleft()
            elif self.played and not self.n_clears:
                self.ran_dry = True

    async def _listen(self) -> None:
        with suppress(ConnectionClosed):
            async for frame in self.socket:
                await self.take(frame)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.begin()
        tasks = [asyncio.create_task(work) for work in (self._speak(), self._listen())]
        try:
            yield
            with suppress(ConnectionClosed):
                await self.end()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def signature(url: str, token: str) -> dict[str, str]:
    """Twilio's header of a socket's handshake."""
    digest = hmac.new(token.encode(), url.encode(), hashlib.sha1).digest()
    return {"x-twilio-signature": base64.b64encode(digest).decode()}


class Twilio(Service):
    path = "/v1/telephony/twilio"
    call = "CA0123456789"

    async def _send(self, event: str, **fields: Any) -> None:
        self._n_sent += 1
        number = {"sequenceNumber": str(self._n_sent), "streamSid": "MZ1"}
        await self.socket.send(json.dumps({"event": event, **number, **fields}))

    async def begin(self) -> None:
        await self.socket.send(
            json.dumps({"event": "connected", "protocol": "Call", "version": "1.0.0"})
        )
        form = {"encoding": "audio/x-mulaw", "sampleRate": 8000, "channels": 1}
        start = {"accountSid": "AC1", "streamSid": "MZ1", "callSid": self.call}
        start |= {"tracks": ["inbound"], "mediaFormat": form, "customParameters": {}}
        await self._send("start", start=start)

    async def send_media(self, raw: bytes, n: int) -> None:
        payload = base64.b64encode(raw).decode()
        media = {"track": "inbound", "chunk": str(n), "timestamp": str(20 * n), "payload": payload}
        await self._send("media", media=media)

    async def press(self, digit: str) -> None:
        await self._send("dtmf", dtmf={"track": "inbound_track", "digit": digit})

    async def marked(self, name: str) -> None:
        await self._send("mark", mark={"name": name})

    async def end(self) -> None:
        await self._send("stop", stop={"accountSid": "AC1", "callSid": self.call})

    async def take(self, frame: str | bytes) -> None:
        message = json.loads(frame)
        assert message.pop("streamSid") == "MZ1"
        match message:
            case {"event": "media", "media": {"payload": payload}}:
                self.media(base64.b64decode(payload, validate=True))
                return
            case {"event": "mark", "mark": {"name": name}}:
                self.waits.append(name)
            case {"event": "clear"}:
                await self.clear()
        self.told.append(message)


class Telnyx(Service):
    path = "/v1/telephony/telnyx"
    call = "v2:T02llQxIyaRkhfRKxgAP8nY511EhFLizdvdUKJiSw8d6A9BborherQ"
    _held: tuple[bytes, int] | None = None

    async def _send(self, event: str, **fields: Any) -> None:
        self._n_sent += 1
        number = {"sequence_number": str(self._n_sent), "stream_id": "32DE"}
        await self.socket.send(json.dumps({"event": event, **number, **fields}))

    async def begin(self) -> None:
        await self.socket.send(json.dumps({"event": "connected", "version": "1.0.0"}))
        form = {"encoding": "PCMU", "sample_rate": 8000, "channels": 1}
        start = {"user_id": "3E", "call_control_id": self.call, "media_format": form}
        await self._send("start", start=start)

    async def send_media(self, raw: bytes, n: int) -> None:
        """Every tenth piece comes after the next one."""
        if n % 10 == 0:
            self._held = (raw, n)
            return
        await self._media(raw, n)
        if self._held is not None:
            held, self._held = self._held, None
            await self._media(*held)

    async def _media(self, raw: bytes, n: int) -> None:
        payload = base64.b64encode(raw).decode()
        await self._send("media", media={"track": "inbound", "chunk": str(n), "payload": payload})

    async def press(self, digit: str) -> None:
        await self._send("dtmf", dtmf={"digit": digit})

    async def marked(self, name: str) -> None:
        await self._send("mark", mark={"name": name})

    async def end(self) -> None:
        await self._send("stop", stop={"call_control_id": self.call})

    async def take(self, frame: str | bytes) -> None:
        message = json.loads(frame)
        assert message.keys() <= {"event", "media", "mark"}
        match message:
            case {"event": "media", "media": {"payload": payload}}:
                self.media(base64.b64decode(payload, validate=True))
                return
            case {"event": "mark", "mark": {"name": name}}:
                self.waits.append(name)
            case {"event": "clear"}:
                await self.clear()
        self.told.append(message)


class Asterisk(Service):
    """In words. A binary frame comes before the start."""

    path = "/v1/telephony/asterisk"
    call = "e226e283-c90a-4ea9-9e37-389000b9ef47"

    async def begin(self) -> None:
        await self.socket.send(_SILENCE * FRAME)
        await self.event(
            "MEDIA_START", connection_id=self.call, channel="WebSocket/one", format="ulaw",
            optimal_frame_size=FRAME, ptime=20,
        )  # fmt: skip

    async def event(self, name: str, **fields: Any) -> None:
        await self.socket.send(" ".join((name, *(f"{k}:{v}" for k, v in fields.items()))))

    def command(self, frame: str) -> tuple[str, str]:
        name, _, argument = frame.partition(" ")
        return name, argument

    async def send_media(self, raw: bytes, n: int) -> None:
        await self.socket.send(raw)

    async def press(self, digit: str) -> None:
        await self.event("DTMF_END", channel_id="pbx1", digit=digit)

    async def marked(self, name: str) -> None:
        await self.event("MEDIA_MARK_PROCESSED", correlation_id=name)

    async def end(self) -> None:
        await self.socket.close()

    async def take(self, frame: str | bytes) -> None:
        if isinstance(frame, bytes):
            assert len(frame) % FRAME == 0  # it drops the rest
            self.media(frame)
            return
        name, argument = self.command(frame)
        self.told.append(name)
        if name == "MARK_MEDIA":
            self.waits.append(argument)
        elif name == "FLUSH_MEDIA":
            await self.clear()

    async def clear(self) -> None:
        """Its marks do not come back."""
        self.n_clears += 1
        self.waits.clear()


class AsteriskJson(Asterisk):
    async def event(self, name: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"event": name, **fields}))

    def command(self, frame: str) -> tuple[str, str]:
        command = json.loads(frame)
        return command["command"], command.get("correlation_id", "")


class Plain(Service):
    path = "/v1/telephony/g711"

    async def begin(self) -> None:
        await self.socket.send(_SILENCE * FRAME)

    async def send_media(self, raw: bytes, n: int) -> None:
        await self.socket.send(raw)

    async def press(self, digit: str) -> None:
        await self.socket.send(digit)

    async def end(self) -> None:
        await self.socket.close()

    async def take(self, frame: str | bytes) -> None:
        assert isinstance(frame, bytes)
        self.media(frame)


@asynccontextmanager
async def phoning(
    kind: type[Service], address: str, headers: dict[str, str] | None = None
) -> AsyncIterator[Service]:
    """address: host:port."""
    async with connect(
        f"ws://{address}{kind.path}", additional_headers=headers, compression=None
    ) as socket:
        service = kind(socket)
        async with service.running():
            yield service
