"""A server under test, and connections to it whose events are all checked.

In: the server's URL. Out: its events; Violation for the first that is none of the protocol.
"""

import asyncio
import base64
import importlib
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, get_args

import httpx
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter, ValidationError
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from sglang_live.conformance.order import EventOrder

Event = dict[str, Any]

PATIENCE_S = 30.0
RATE_HZ = 24_000
# Of an append, as microphones send it.
_PIECE_S = 0.1
_PAUSE_S = 1.5
_ANY_LENGTH: dict[str, Any] = {"max_size": None, "max_queue": None, "proxy": None}
_TYPES = {
    get_args(model.model_fields["type"].annotation)[0]: model
    for model in get_args(get_args(RealtimeServerEvent)[0])
    if hasattr(model, "model_fields")
}


class Violation(Exception):
    """What the server does is not the protocol."""


class Skip(Exception):
    """It cannot be found out here."""


def hold(condition: object, why: str) -> None:
    if not condition:
        raise Violation(why)


class Session:
    """A connection of the Realtime API.

    Attributes:
        events: all that came, in order.
    """

    def __init__(self, socket: ClientConnection):
        self._socket = socket
        self._order = EventOrder()
        self.events: list[Event] = []

    async def send(self, kind: str, **fields: Any) -> str:
        """Returns the event's id."""
        event_id = f"event_{uuid.uuid4().hex[:12]}"
        await self.raw(json.dumps({"type": kind, "event_id": event_id, **fields}))
        return event_id

    async def raw(self, frame: str | bytes) -> None:
        await self._socket.send(frame)

    async def update(self, **session: Any) -> Event:
        """Returns the session that the server shows."""
        await self.send("session.update", session={"type": "realtime", **session})
        shown: Event = (await self.find("session.updated"))["session"]
        return shown

    async def say(self, pcm: bytes, *, pause_s: float = _PAUSE_S) -> None:
        """Append sound at the pace of time, and silence after it."""
        step = int(_PIECE_S * RATE_HZ) * 2
        sound = pcm + bytes(int(pause_s * RATE_HZ) * 2)
        for at in range(0, len(sound), step):
            audio = base64.b64encode(sound[at : at + step]).decode()
            await self.raw(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
            await asyncio.sleep(_PIECE_S)

    async def append(self, pcm: bytes) -> None:
        """Append sound at once."""
        audio = base64.b64encode(pcm).decode()
        await self.send("input_audio_buffer.append", audio=audio)

    async def write(self, text: str) -> None:
        content = [{"type": "input_text", "text": text}]
        item = {"type": "message", "role": "user", "content": content}
        await self.send("conversation.item.create", item=item)

    async def next(self, within_s: float = PATIENCE_S) -> Event:
        try:
            async with asyncio.timeout(within_s):
                frame = await self._socket.recv()
        except TimeoutError:
            raise Violation(f"nothing comes within {within_s:g} s") from None
        except ConnectionClosed as closed:
            raise Violation(f"the server closes the connection: {closed}") from None
        event = parsed(frame)
        check_types(event)
        try:
            self._order.see(event)
        except (AssertionError, KeyError) as fault:
            raise Violation(f"{event.get('type')}: {fault!r}") from None
        self.events.append(event)
        return event

    async def find(self, *kinds: str, within_s: float = PATIENCE_S) -> Event:
        """The next event of one of these types."""
        while True:
            event = await self.next(within_s)
            if event["type"] in kinds:
                return event
            hold(event["type"] != "error", f"an error in place of {kinds}: {event.get('error')}")

    async def refusal(self, event_id: str | None = None) -> Event:
        """The error that comes next. event_id: of the event that has caused it."""
        while (event := await self.next())["type"] != "error":
            pass
        error: Event = event["error"]
        hold(error.get("message"), "an error without a message")
        if event_id is not None:
            hold(error.get("event_id") == event_id, f"the error does not name the event: {error}")
        return error

    async def lives(self) -> None:
        """It still takes events."""
        await self.update(instructions="Be brief.")

    async def quiet(self, seconds: float, *unwanted: str) -> None:
        """None of these comes for a while."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    event = await self.next(PATIENCE_S)
                    hold(not event["type"].startswith(unwanted), f"unwanted: {event['type']}")
        except TimeoutError:
            return

    async def response(self, **response: Any) -> Event:
        """Ask for one, and wait for its end."""
        await self.send("response.create", response=response)
        done: Event = (await self.find("response.done", within_s=60))["response"]
        return done

    async def closed(self) -> int:
        """Wait for the end of the connection. Returns its code."""
        while True:
            try:
                await self.next()
            except Violation:
                hold(self._socket.close_code is not None, "the connection stays open")
                return int(self._socket.close_code or 0)

    def sound(self, response_id: str) -> bytes:
        """The audio of a response that has come."""
        kind = "response.output_audio.delta"
        mine = [e for e in self.events if e["type"] == kind and e["response_id"] == response_id]
        return b"".join(base64.b64decode(event["delta"], validate=True) for event in mine)


def parsed(frame: str | bytes) -> Event:
    hold(isinstance(frame, str), "a binary frame")
    try:
        event = json.loads(frame)
    except ValueError as error:
        raise Violation(f"a frame is not JSON: {error}") from None
    hold(isinstance(event, dict) and isinstance(event.get("type"), str), "an event without a type")
    known: Event = event
    return known


def check_types(event: Event) -> None:
    """Events that the types do not know are extensions, which clients ignore."""
    if (model := _TYPES.get(event["type"])) is None:
        return
    try:
        model.model_validate(event)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, first["loc"]))
        raise Violation(f"{event['type']}: {at}: {first['msg']}") from None


def live_types() -> TypeAdapter[Any]:
    """Raises Skip if the installed openai is older than the Live API."""
    try:
        types = importlib.import_module("openai.types.live")
    except ImportError:
        raise Skip("the installed package openai has no types of the Live API") from None
    return TypeAdapter(types.ServerEvent)


class Server:
    """
    url: http://host:port, without a path.
    model: None: the first that it lists.
    """

    def __init__(self, url: str, key: str | None, model: str | None, speech: bytes | None):
        self.url = url.rstrip("/")
        self.key = key
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.is_ours = False
        self._model = model
        self._speech = speech

    @property
    def model(self) -> str:
        assert self._model is not None, "look() finds it"
        return self._model

    async def look(self) -> None:
        """Find out what serves there. Raises Violation."""
        async with self.http() as http:
            try:
                answer = await http.get("/v1/models")
            except httpx.HTTPError as error:
                raise Violation(f"{self.url} is unreachable: {error!r}") from None
        hold(answer.status_code == 200, f"GET /v1/models is {answer.status_code}")
        models = answer.json()["data"]
        self._model = self._model or models[0]["id"]
        self.is_ours = any(model.get("owned_by") == "sglang_live" for model in models)

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, headers=self.headers, timeout=PATIENCE_S)

    def ws(self, path: str) -> str:
        return "ws" + self.url.removeprefix("http") + path

    def socket(self, path: str, headers: dict[str, str] | None = None) -> connect:
        given = self.headers if headers is None else headers
        return connect(self.ws(path), additional_headers=given, **_ANY_LENGTH)

    @asynccontextmanager
    async def session(self, query: str | None = None) -> AsyncIterator[Session]:
        """One that has begun."""
        query = f"model={self.model}" if query is None else query
        async with self.socket(f"/v1/realtime?{query}") as socket:
            session = Session(socket)
            first = await session.next()
            hold(first["type"] == "session.created", f"the first event is {first}")
            yield session

    async def speech(self) -> bytes:
        """A voice: by default the server's own. PCM at RATE_HZ."""
        if self._speech is None:
            async with self.session() as session:
                await session.update(output_modalities=["audio"])
                await session.write("What is the capital of France?")
                done = await session.response()
                self._speech = session.sound(done["id"])
            hold(len(self._speech) > RATE_HZ, "the server says less than half a second")
        return self._speech
