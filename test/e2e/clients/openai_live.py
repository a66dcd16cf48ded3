"""OpenAI's SDK as a client of the Live API.

    python openai_live.py URL RECORDING PART [SESSION]

RECORDING: int16 at 24 kHz. SESSION: more fields of the session, as JSON. Prints one JSON object:
the events, but of audio only the sizes, the loudness and the times of arrival. Every event is
checked against the SDK's own types, and grouped into turns by the SDK.
"""

import asyncio
import base64
import json
import sys
import time
from array import array
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from openai.lib.live import TranscriptGrouper
from openai.types.live import ConnectServerEvent, ServerEvent
from pydantic import TypeAdapter

FRAME_S = 0.02
FRAME_BYTES = 960
SAID = Path(sys.argv[2]).read_bytes()
CHECKED: TypeAdapter[Any] = TypeAdapter(ServerEvent)
CHECKED_ASIDE: TypeAdapter[Any] = TypeAdapter(ConnectServerEvent)
WITHIN_S = 60


class Talk:
    """A session with an open microphone."""

    def __init__(self, client, connection):
        self.client = client
        self.connection = connection
        self.events: list[dict] = []
        self.arrivals: list[float] = []
        self.loudness: list[int] = []
        self.turns: list[dict] = []
        self._grouper = TranscriptGrouper()
        self._grouper.on("segment.closed", self._closed)
        self._left = b""

    def _closed(self, closed) -> None:
        turn = closed.segment
        self.turns.append({"speaker": turn.speaker, "text": turn.text, "why": closed.reason})

    def say(self) -> None:
        self._left = SAID

    async def speak(self) -> None:
        due_s = time.monotonic()
        while True:
            frame = self._left[:FRAME_BYTES].ljust(FRAME_BYTES, b"\0")
            self._left = self._left[FRAME_BYTES:]
            audio = base64.b64encode(frame).decode()
            await self.connection.session.input_audio.append(audio=audio)
            due_s += FRAME_S
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    async def until(self, kind: str) -> dict:
        """The next event of this type."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                event = await self.next()
                if event["type"] == kind:
                    return event

    async def next(self) -> dict:
        frame = await self.connection.recv_bytes()
        event = json.loads(frame)
        CHECKED.validate_python(event)
        self._grouper.push(self.connection.parse_event(frame))
        if event["type"] == "session.output_audio.delta":
            samples = array("h", base64.b64decode(event["delta"]))
            self.arrivals.append(time.monotonic())
            self.loudness.append(max(map(abs, samples)))
        else:
            self.events.append(event)
        if event["type"] == "error":
            raise RuntimeError(event["error"]["message"])
        return event

    async def until_tick(self, number: int) -> None:
        async with asyncio.timeout(WITHIN_S):
            while len(self.loudness) < number:
                await self.next()

    async def until_quiet(self, ticks: int = 10) -> None:
        """Wait for speech, and for some silence after it."""
        async with asyncio.timeout(WITHIN_S):
            while not self.loudness or not self.loudness[-1]:
                await self.next()
            while any(self.loudness[-ticks:]):
                await self.next()


async def speech(talk: Talk) -> None:
    talk.say()
    await talk.until_quiet()


async def typed(talk: Talk) -> None:
    """Without a microphone."""
    await talk.connection.session.commentary.append(content="Greet me.", delegation_id=None)
    await talk.until("session.commentary.appended")
    await talk.until_quiet()


async def muted(talk: Talk) -> None:
    await talk.connection.session.input_audio.mute()
    await talk.until("session.input_audio.muted")
    talk.say()
    for _ in range(40):
        await talk.next()
    await talk.connection.session.input_audio.unmute()
    await talk.until("session.input_audio.unmuted")


async def duplex(talk: Talk) -> None:
    """With a model that hears while it speaks: neither side waits for the other."""
    await talk.until_tick(15)
    talk.say()
    await talk.until_tick(40)
    await talk.connection.session.input_audio.mute()
    await talk.until("session.input_audio.muted")
    await talk.until_tick(60)
    await talk.connection.session.input_audio.unmute()
    await talk.until("session.input_audio.unmuted")


async def interrupted(talk: Talk) -> None:
    await talk.connection.session.commentary.append(content="Talk.", delegation_id=None)
    while not talk.loudness or not talk.loudness[-1]:
        await talk.next()
    for _ in range(10):
        await talk.next()
    talk.say()
    talk.events.append({"type": "said", "tick": len(talk.loudness)})
    for _ in range(30):
        await talk.next()


async def delegated(talk: Talk) -> None:
    talk.say()
    created = await talk.until("session.delegation.created")
    delegation = created["delegation"]["id"]
    session = talk.connection.session
    await session.thinking.append(content="It is raining.", delegation_id=delegation)
    await talk.until("session.thinking.appended")
    await session.commentary.append(content="It rains in Rome.", delegation_id=delegation)
    await talk.until_quiet()


async def decided(talk: Talk) -> None:
    """What is asked is decided, and so is what the model delegates."""
    item = {"type": "message", "role": "user", "content": "It rains."}
    await talk.connection.decision.item.create(item=item)
    await talk.until("decision.item.created")
    await talk.connection.decision.create(event_id="mine")
    await talk.until("decision.event")
    talk.say()
    await talk.until("decision.event")


async def aside(talk: Talk) -> None:
    """A second socket has the model speak, and sees what the first one sees."""
    session = talk.events[0]["session"]["id"]
    async with talk.client.live.sideband.connect(session_id=session) as sideband:
        seen = [json.loads(await sideband.recv_bytes())]
        await sideband.session.commentary.append(content="Greet me.", delegation_id=None)
        watching = asyncio.create_task(watch(sideband, seen))
        await talk.until_quiet()
        await talk.connection.session.close()
        await talk.until("session.closed")
        await asyncio.wait_for(watching, WITHIN_S)
    talk.events.insert(-1, {"type": "seen", "events": seen})


async def watch(sideband, seen: list[dict]) -> None:
    """Until the session closes."""
    while seen[-1]["type"] != "session.closed":
        seen.append(json.loads(await sideband.recv_bytes()))
        CHECKED_ASIDE.validate_python(seen[-1])


QUESTIONS = [
    {"type": "predicate", "name": "rain", "instructions": "Does it rain?"},
    {"type": "choice", "instructions": "Where?", "choices": [{"value": "in"}, {"value": True}]},
    {"type": "score", "instructions": "How wet?", "levels": [{"label": "dry"}, {"label": "wet"}]},
]
DECISIONS = {"type": "decisions", "decisions": {"model": "gpt-6-luna", "questions": QUESTIONS}}
PARTS = {
    "aside": aside,
    "decided": decided,
    "speech": speech,
    "typed": typed,
    "muted": muted,
    "duplex": duplex,
    "interrupted": interrupted,
    "delegated": delegated,
}


async def main(url: str, part: str, more: dict[str, Any]) -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    async with client.live.connect() as connection:
        talk = Talk(client, connection)
        if part == "decided":
            more = {"delegation": DECISIONS, **more}
        await connection.session.start(session={"model": "gpt-live-1", **more})
        await talk.until("session.started")
        speaking = None if part == "typed" else asyncio.create_task(talk.speak())
        await PARTS[part](talk)
        if speaking:
            speaking.cancel()
        if part != "aside":
            await connection.session.close()
            await talk.until("session.closed")
    arrivals = [at_s - talk.arrivals[0] for at_s in talk.arrivals]
    report = {"events": talk.events, "arrivals": arrivals, "loudness": talk.loudness}
    print(json.dumps({**report, "turns": talk.turns}))


asyncio.run(main(sys.argv[1], sys.argv[3], json.loads("".join(sys.argv[4:]) or "{}")))
