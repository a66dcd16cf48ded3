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
from test.e2e.socket_client import clip_24k
from test.unit.client.cutter import Cutter

pytestmark = [pytest.mark.e2e]

SEED = 47
N_ROUNDS = 5
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
    "max_output_tokens": 24,
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


async def test_a_conversation_that_is_cut_is_heard_once_and_prefilled_once(server):
    cutter = Cutter(f"127.0.0.1:{server.port}")
    said = clip_24k("sp_jfk.flac", 2.0)
    n_held = 0
    async with cutter.listening() as address:
        talker = Talker(f"ws://{address}/v1/realtime")
        await talker.open()
        await talker.send("session.update", session=SETTINGS)
        await talker.until("session.updated")
        cutting = asyncio.create_task(cut_at_drawn_times(cutter))
        for n_round in range(1, N_ROUNDS + 1):
            await talker.speak(said)
            called = await talker.respond(tool_choice="required")
            [call] = [one for one in called["output"] if one["type"] == "function_call"]
            assert json.loads(call["arguments"])["town"] in ("Rome", "Oslo")
            output = {"type": "function_call_output", "call_id": call["call_id"], "output": "Hot."}
            await talker.send("conversation.item.create", item=output)
            answer = await talker.respond(tool_choice="none")
            [item] = answer["output"]
            await talker.send("conversation.item.retrieve", item_id=item["id"])
            kept = (await talker.until("conversation.item.retrieved"))["item"]["content"][0]
            assert base64.b64decode(kept["audio"]) == bytes(talker.audio[item["id"]])
            for response in (called, answer):
                usage = response["usage"]
                details = usage["input_token_details"]
                assert details["cached_tokens"] >= n_held - 1
                n_held = usage["input_tokens"] + usage["output_token_details"]["text_tokens"]
            print(n_round, details, cutter.n_lines)
        cutting.cancel()
        await talker.close()
    ids = [event["event_id"] for event in talker.events]
    assert len(ids) == len({*ids})
    assert cutter.n_lines > 4 * N_ROUNDS
    server.wait_until_free()
