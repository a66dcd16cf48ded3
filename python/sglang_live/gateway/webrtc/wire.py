"""The wire of a WebRTC call: a data channel and packets of sound, and sidebands beside them.

In and out: text frames, the user's sound as binary ones. Owner: one CallWire per call.
"""

import asyncio
from typing import Any

import orjson
from prometheus_client import Counter

from sglang_live.gateway.call.outbox import Outbox
from sglang_live.gateway.webrtc.processes import MediaLine
from sglang_live.gateway.webrtc.sound import CallSound
from sglang_live.ids import new_id
from sglang_live.webrtc.messages import Ended, Event, Heard, Opened

# Events that a sideband has not read; beyond them it is closed, and the call goes on.
_MOST_UNREAD = 4096


class Sideband:
    """A second client of a call: it gets its events, and sends some."""

    def __init__(self, call: MediaLine):
        self._call = call
        self._unread: asyncio.Queue[str | None] = asyncio.Queue(_MOST_UNREAD)

    def take(self, frame: str) -> bool:
        """Returns whether it keeps up."""
        if self._unread.full():
            return False
        self._unread.put_nowait(frame)
        return True

    def end(self) -> None:
        while self._unread.full():
            self._unread.get_nowait()
        self._unread.put_nowait(None)

    async def next(self) -> str | None:
        """The call's next event; None: there are no more."""
        return await self._unread.get()

    def send(self, frame: str) -> None:
        """An event for the call, as if its client had sent it."""
        self._call.received.put_nowait(Event(self._call.id, frame))


class CallWire:
    """
    is_lost: never. A call whose connection is lost has ended; no other one continues it.
    """

    is_lost = False

    def __init__(self, call: MediaLine, shortened: Counter, opening: str | None = None):
        """
        Args:
            shortened: counts events that were too large for the data channel, by outcome.
            opening: the first frame that comes, once the channel is open; None: the client's.
        """
        self._call = call
        self._shortened = shortened
        self._opening = opening
        self._opened = asyncio.Event()
        self._most_bytes = 0
        self._sidebands: list[Sideband] = []

    def open_sound(self, outbox: Outbox) -> CallSound:
        sound = CallSound(self._call, outbox, outbox.emit)
        self._call.on_left = sound.left
        return sound

    def attach(self) -> Sideband:
        sideband = Sideband(self._call)
        self._sidebands.append(sideband)
        return sideband

    def detach(self, sideband: Sideband) -> None:
        if sideband in self._sidebands:
            self._sidebands.remove(sideband)

    async def receive(self) -> str | bytes | None:
        while True:
            match await self._call.received.get():
                case Opened(most_bytes=most_bytes):
                    self._most_bytes = most_bytes
                    self._opened.set()
                    if self._opening is not None:
                        return self._opening
                case Heard(pcm=pcm):
                    return pcm
                case Event(text=text):
                    return text
                case Ended():
                    return None

    async def send(self, frame: str) -> None:
        await self._opened.wait()
        for sideband in list(self._sidebands):
            if not sideband.take(frame):
                self.detach(sideband)
                sideband.end()
        if self._most_bytes and len(frame) * 4 > self._most_bytes:
            frame = self._fitting(frame)
        self._call.tell(Event(self._call.id, frame))
        await self._call.flushed()

    async def close(self, code: int, reason: str) -> None:
        self.hang_up()

    def hang_up(self) -> None:
        """The events that were sent still arrive."""
        self._call.hang_up()
        for sideband in self._sidebands:
            sideband.end()
        self._sidebands.clear()
        self._call.received.put_nowait(Ended(self._call.id, "hung up"))

    def _fitting(self, frame: str) -> str:
        """The event without audio and pictures, if it exceeds what the client accepts in one
        message.
        """
        if len(frame.encode()) <= self._most_bytes:
            return frame
        event = orjson.loads(frame)
        _drop_audio(event)
        short = orjson.dumps(event)
        if len(short) <= self._most_bytes:
            self._shortened.labels("without_audio").inc()
            return short.decode()
        self._shortened.labels("dropped").inc()
        error = {
            "type": "server_error",
            "code": "event_too_large",
            "message": f"An event {event['type']} exceeds the {self._most_bytes} bytes of a "
            "message on this data channel.",
            "param": None,
            "event_id": None,
        }
        told = {"type": "error", "event_id": new_id("event"), "error": error}
        return orjson.dumps(told).decode()


def _drop_audio(value: Any) -> None:
    """From parts of items, and pictures. Transcripts stay."""
    if isinstance(value, list):
        for one in value:
            _drop_audio(one)
    elif isinstance(value, dict):
        if value.get("type") in ("input_audio", "output_audio") and isinstance(
            value.get("audio"), str
        ):
            del value["audio"]
        if value.get("type") == "input_image":
            value.pop("image_url", None)
        for one in value.values():
            _drop_audio(one)
