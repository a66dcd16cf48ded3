"""Checks of the Live API over its WebSocket."""

import asyncio
import base64
import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pydantic import ValidationError
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from sglang_live.conformance.server import (
    PATIENCE_S,
    RATE_HZ,
    Event,
    Server,
    Violation,
    hold,
    live_types,
    parsed,
)

PATH = "/v1/live/sessions"
_AUDIO = "session.output_audio.delta"
_SAID, _DELEGATED = "session.output_transcript.delta", "session.delegation.created"


class LiveSession:
    """A connection of the Live API.

    Attributes:
        events: all that came, in order, but for audio.
        sound: all audio that came.
    """

    def __init__(self, socket: ClientConnection, model: str):
        self._socket = socket
        self._model = model
        self._types = live_types()
        self._ids: set[str] = set()
        self.events: list[Event] = []
        self.sound = bytearray()

    async def send(self, kind: str, **fields: Any) -> str:
        """Returns the event's id."""
        event_id = f"event_{uuid.uuid4().hex[:12]}"
        await self._socket.send(json.dumps({"type": kind, "event_id": event_id, **fields}))
        return event_id

    async def start(self, **session: Any) -> str:
        return await self.send("session.start", session={"model": self._model, **session})

    async def next(self, within_s: float = PATIENCE_S) -> Event:
        try:
            async with asyncio.timeout(within_s):
                event = parsed(await self._socket.recv())
        except TimeoutError:
            raise Violation(f"nothing comes within {within_s:g} s") from None
        try:
            self._types.validate_python(event)
        except ValidationError as error:
            raise Violation(f"{event['type']}: {error.errors()[0]['msg']}") from None
        if (event_id := event.get("event_id")) is not None:
            hold(event_id not in self._ids, "an event_id twice")
            self._ids.add(event_id)
        if event["type"] == _AUDIO:
            self.sound += base64.b64decode(event["delta"], validate=True)
        else:
            self.events.append(event)
        return event

    async def find(self, kind: str, within_s: float = PATIENCE_S) -> Event:
        try:
            async with asyncio.timeout(within_s):
                while (event := await self.next())["type"] != kind:
                    if event["type"] == "error" and kind != "error":
                        raise Violation(f"an error in place of {kind}: {event['error']}")
        except TimeoutError:
            raise Violation(f"no {kind} within {within_s:g} s") from None
        return event

    def has(self, *kinds: str) -> bool:
        return any(event["type"] in kinds for event in self.events)

    async def refusal(self, event_id: str) -> Event:
        event = await self.find("error")
        error: Event = event["error"]
        told = event.get("client_event_id") or error.get("client_event_id")
        hold(told == event_id, f"the error does not name the event: {event}")
        return error

    async def until_closed(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            try:
                while True:
                    await self.next()
            except ConnectionClosed:
                return


@asynccontextmanager
async def _connected(server: Server) -> AsyncIterator[LiveSession]:
    live_types()
    async with server.socket(PATH) as socket:
        yield LiveSession(socket, server.model)


@asynccontextmanager
async def _started(server: Server, **session: Any) -> AsyncIterator[LiveSession]:
    async with _connected(server) as live:
        await live.start(**session)
        first = await live.next()
        hold(first["type"] == "session.started", f"the first event is {first}")
        yield live


async def silent_until_the_start(server: Server) -> None:
    """Until session.start the server is silent; anything else first is an error."""
    async with _connected(server) as live:
        try:
            async with asyncio.timeout(1.0):
                event = await live.next()
            raise Violation(f"before session.start comes {event['type']}")
        except TimeoutError:
            pass
        await live.send("session.input_audio.mute")
        await live.find("error")


async def started(server: Server) -> None:
    """session.started shows the session, and names the event."""
    async with _connected(server) as live:
        event_id = await live.start(instructions="Be brief.")
        event = await live.next()
        hold(event["type"] == "session.started", f"the first event is {event}")
        hold(event.get("client_event_id") == event_id, "it does not name session.start")
        shown = event["session"]
        hold(shown["instructions"] == "Be brief.", "the instructions are not shown as set")
        hold(shown["status"] == "active" and shown["expires_at"] > time.time(), "it is no session")


async def endless_audio(server: Server) -> None:
    """Audio comes at the pace of time, silence included, as exact zeros."""
    async with _started(server) as live:
        began_s = time.monotonic()
        while time.monotonic() < began_s + 3:
            await live.next()
        seconds = len(live.sound) / 2 / RATE_HZ
        hold(2.6 < seconds < 3.6, f"in 3 s come {seconds:.1f} s of audio")
        hold(not any(live.sound), "silence is not zeros")


async def commentary(server: Server) -> None:
    """Commentary is acknowledged and spoken, with its words."""
    async with _started(server) as live:
        told = await live.send(
            "session.commentary.append", content="Greet the user.", delegation_id=None
        )
        appended = await live.find("session.commentary.appended")
        hold(appended.get("client_event_id") == told, "it does not name the event")
        said = await live.find(_SAID)
        hold(said["start_ms"] <= said["end_ms"], "words that end before they begin")
        hold(any(live.sound), "words without sound")


async def a_spoken_turn(server: Server) -> None:
    """Speech is answered or delegated, and what is said comes in order of time."""
    speech = await server.speech()
    async with _started(server) as live:
        step = RATE_HZ // 10 * 2
        sound = speech + bytes(RATE_HZ * 2 * 3)
        for at in range(0, len(sound), step):
            audio = base64.b64encode(sound[at : at + step]).decode()
            await live.send("session.input_audio.append", audio=audio)
            await asyncio.sleep(0.1)
        while not live.has(_SAID, _DELEGATED):
            await live.next()
        if not live.has(_SAID):  # the work is the application's, which reports it
            [delegated] = [event for event in live.events if event["type"] == _DELEGATED]
            done = {"content": "It is done.", "delegation_id": delegated["delegation"]["id"]}
            await live.send("session.commentary.append", **done)
            await live.find(_SAID, 120)
        starts = [event["start_ms"] for event in live.events if event["type"] == _SAID]
        hold(starts == sorted(starts), "start_ms falls")


async def mute(server: Server) -> None:
    """Mute and unmute are confirmed."""
    async with _started(server) as live:
        for verb in ("mute", "unmute"):
            event_id = await live.send(f"session.input_audio.{verb}")
            event = await live.find(f"session.input_audio.{verb}d")
            hold(event.get("client_event_id") == event_id, "it does not name the event")


async def fixture(server: Server) -> None:
    """A fixture is played as it is."""
    async with _started(server) as live:
        tone = b"\x00\x10" * (RATE_HZ // 2)
        audio = base64.b64encode(tone).decode()
        await live.send("session.output_audio.fixture.play", audio=audio)
        await live.find("session.output_audio.fixture.playing")
        await live.find("session.output_audio.fixture.played")
        hold(tone in bytes(live.sound), "other sound is played")


async def strict_start(server: Server) -> None:
    """An unknown field is an error with its path, before anything runs."""
    async with _connected(server) as live:
        await live.start(smell="sweet")
        error = await live.find("error")
        hold(error["error"].get("param") == "session.smell", f"param is {error['error']}")
        hold("session.started" not in {e["type"] for e in live.events}, "the session starts")
        await live.until_closed()


async def errors_end_nothing(server: Server) -> None:
    """Events that are refused are errors that name them; the session goes on."""
    async with _started(server) as live:
        for kind, fields in (
            ("session.start", {"session": {"model": server.model}}),
            ("session.sing", {}),
            ("session.input_audio.append", {"audio": "AAA"}),
            ("session.commentary.append", {"content": "Hello."}),
            ("session.thinking.append", {"content": "x", "delegation_id": "del_unknown"}),
            ("session.update", {"session": {"instructions": "Be kind."}}),
        ):
            await live.refusal(await live.send(kind, **fields))
        await live.send("session.input_audio.mute")
        await live.find("session.input_audio.muted")


async def closing(server: Server) -> None:
    """session.close is answered by session.closed, and the socket ends."""
    async with _started(server) as live:
        await live.send("session.close")
        closed = await live.find("session.closed")
        hold(closed["reason"] == "close_requested", f"its reason is {closed['reason']}")
        hold(closed["usage"]["seconds"] >= 0, "it has no usage")
        await live.until_closed()


LIVE = (
    silent_until_the_start, started, endless_audio, commentary, a_spoken_turn, mute, fixture,
    strict_start, errors_end_nothing, closing,
)  # fmt: skip
