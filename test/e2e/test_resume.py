"""A spoken conversation with functions over a connection that is cut at drawn times.

The client is the package's own. What it has heard must be what the server has made, and no token is
prefilled twice.
"""

import asyncio
import base64
import json
import random

import numpy as np
import pytest

from sglang_live.client.connection import SessionOptions
from sglang_live.client.playback_clock import PlaybackClock
from sglang_live.client.resuming import ResumingSocket
from sglang_live.clock import MonotonicClock
from test.e2e.socket_client import NO_VAD, clip_24k, connected
from test.unit.client.cutter import Cutter

pytestmark = [pytest.mark.e2e]

SEED = 47
N_ROUNDS = 5
# Tokens of a question and of a page of KV.
N_PAGE = 150
# Between two cuts, seconds.
LEAST_S, MOST_S = 0.3, 1.5
TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"town": {"type": "string", "enum": ["Rome", "Oslo"]}},
        "required": ["town"],
        "additionalProperties": False,
    },
}
SETTINGS = {
    "type": "realtime",
    "resumable": True,
    "temperature": 0,
    "instructions": "Answer in one short sentence.",
    "tools": [TOOL],
    "audio": {"input": {"turn_detection": None}},
}


class Talker:
    """
    events: of the server. audio: by item.
    """

    def __init__(self, url: str):
        self._playback = PlaybackClock(MonotonicClock())
        self._socket = ResumingSocket(SessionOptions(url=url), lambda: self._playback.heard_s)
        self.events: list[dict] = []
        self.audio: dict[str, bytearray] = {}
        self.open, self.close = self._socket.open, self._socket.close

    async def send(self, kind: str, **fields) -> None:
        await self._socket.send({"type": kind, **fields})

    async def until(self, kind: str) -> dict:
        async with asyncio.timeout(60):
            while True:
                event = json.loads(await self._socket.recv())
                self.events.append(event)
                assert event["type"] != "error", event
                if event["type"] == "response.output_audio.delta":
                    self._hear(event["item_id"], base64.b64decode(event["delta"]))
                if event["type"] == kind:
                    return event

    async def speak(self, pcm: np.ndarray) -> None:
        for at in range(0, len(pcm), 480):
            audio = base64.b64encode(pcm[at : at + 480].tobytes()).decode()
            await self.send("input_audio_buffer.append", audio=audio)
            await asyncio.sleep(0.02)
        await self.send("input_audio_buffer.commit")

    async def respond(self, **response) -> dict:
        await self.send("response.create", response=response)
        done = await self.until("response.done")
        await self._playback.wait_until_played()
        return done["response"]

    def _hear(self, item_id: str, pcm: bytes) -> None:
        if item_id not in self.audio:
            self._playback = PlaybackClock(MonotonicClock())
            self.audio[item_id] = bytearray()
        self.audio[item_id] += pcm
        self._playback.packet_received(len(pcm) / 48_000)


async def cut_at_drawn_times(cutter: Cutter) -> None:
    draw = random.Random(SEED)
    while True:
        await asyncio.sleep(draw.uniform(LEAST_S, MOST_S))
        cutter.cut()


async def held(talker: Talker) -> list[tuple]:
    """Hold the conversation. Returns of each response its text, and the tokens that were new."""
    said = clip_24k("sp_jfk.flac", 2.0)
    told = []
    await talker.send("session.update", session=SETTINGS)
    await talker.until("session.updated")
    for _ in range(N_ROUNDS):
        await talker.speak(said)
        called = await talker.respond(tool_choice="required")
        [call] = [one for one in called["output"] if one["type"] == "function_call"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "Hot."}
        await talker.send("conversation.item.create", item=output)
        answer = await talker.respond(max_output_tokens=24)
        [item] = answer["output"]
        await talker.send("conversation.item.retrieve", item_id=item["id"])
        kept = (await talker.until("conversation.item.retrieved"))["item"]["content"][0]
        assert base64.b64decode(kept["audio"]) == bytes(talker.audio[item["id"]])
        for response, text in ((called, call["arguments"]), (answer, kept["transcript"])):
            usage = response["usage"]
            n_cached = usage["input_token_details"]["cached_tokens"]
            told.append((text, usage["input_tokens"], n_cached))
    return told


async def test_a_conversation_that_is_cut_is_heard_once_and_prefilled_once(server):
    undisturbed, cutter = Talker(server.ws), Cutter(f"127.0.0.1:{server.port}")
    async with cutter.listening() as address:
        talker = Talker(f"ws://{address}/v1/realtime")
        await asyncio.gather(undisturbed.open(), talker.open())
        cutting = asyncio.create_task(cut_at_drawn_times(cutter))
        whole, told = await asyncio.gather(held(undisturbed), held(talker))
        cutting.cancel()
        await asyncio.gather(undisturbed.close(), talker.close())
    # One of the first responses finds the instructions of the other.
    assert told[1:] == whole[1:]
    ids = [event["event_id"] for event in talker.events]
    assert len(ids) == len({*ids})
    assert cutter.n_lines > 4 * N_ROUNDS
    server.wait_until_free()


# --- a client without a token ---


async def first_turn(server, said: list[tuple[str, str]]) -> dict:
    """A new session that brings messages in writing. Returns the usage of its first response."""
    async with connected(server.ws) as socket:
        await socket.session(**NO_VAD, instructions="You are a guide.", temperature=0)
        for role, text in said:
            kind = "output_text" if role == "assistant" else "input_text"
            item = {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}
            await socket.send("conversation.item.create", item=item)
        done = await socket.ask("how far is that", max_output_tokens=4)
    usage = done["response"]["usage"]
    return {"n": usage["input_tokens"], **usage["input_token_details"]}


async def test_a_history_that_a_client_brings_again_is_prefilled_once(server):
    more = " Then you turn left, and left again, and you see it." * 12
    said = [
        ("user", "tell me about the old town"),
        ("assistant", "It has three gates." + more),
        ("user", "and the harbour"),
        ("assistant", "It is behind the hill." + more),
    ]
    first = await first_turn(server, said[:2])
    second = await first_turn(server, said)
    third = await first_turn(server, said)
    # All but the last question, and the page of KV that it shares with what is before.
    assert first["cached_tokens"] < N_PAGE
    assert second["cached_tokens"] >= first["n"] - N_PAGE
    assert third["cached_tokens"] >= third["n"] - N_PAGE
