"""A conversation that loses its gateway at drawn moments, again and again, is as one that does not.

The client is the package's own. Each response follows from the history that its turn is given, so
that an item that is lost or comes twice changes all that follow.
"""

import asyncio
import base64
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from sglang_live.client.connection import SessionOptions
from sglang_live.client.playback_clock import PlaybackClock
from sglang_live.client.resuming import ResumingSocket
from sglang_live.clock import MonotonicClock
from sglang_live.core import (
    AudioDelta,
    HistoryItem,
    TextPart,
    TranscriptDelta,
    TurnEvent,
    TurnRequest,
)
from test.unit.client.cutter import Cutter
from test.unit.gateway.fakes import FakeOrchestrator, FakeSession, done

from .test_resume_elsewhere import gateway, is_kept

pytestmark = pytest.mark.usefixtures("must_not_hang")

N_TURNS, N_GATEWAYS, N_WORDS = 6, 3, 10
# Of a gateway, before the next loss: long enough to come back.
LEAST_S, MOST_S = 0.05, 0.4
DELTA = "response.output_audio.delta"


def reply_to(texts: list[str]) -> list[str]:
    return [f"{len(texts)}.{n} " for n in range(N_WORDS)]


def sound_of(n: int) -> bytes:
    """80 ms."""
    return bytes([n + 1, 0]) * 1920


class EchoSession(FakeSession):
    async def respond(self, turn: TurnRequest) -> AsyncIterator[TurnEvent]:
        self.turns.append(turn)
        words = reply_to([item.parts[0].text for item in turn.history])
        n_begun = len(turn.begun.ids) if turn.begun else 0
        self.n_said, self.said = n_begun, "".join(words[:n_begun])
        for n, word in enumerate(words):
            if n >= n_begun:
                self.n_said, self.said = n + 1, self.said + word
                yield TranscriptDelta(word, n + 1)
            yield AudioDelta(sound_of(n))
            await asyncio.sleep(0.02)
        item = HistoryItem(
            key=f"response-{self.session_id}.{self.n_turns:08}",
            role="assistant",
            parts=(TextPart("".join(words)),),
            token_ids=tuple(range(1, 1 + N_WORDS)),
        )
        yield done(item=item, n_frames=N_WORDS)


class EchoOrchestrator(FakeOrchestrator):
    async def open_session(self, session_id: str, **settings) -> EchoSession:
        session = EchoSession(session_id, [])
        session.epoch = settings.get("epoch", 0)
        self.sessions.append(session)
        return session


class Client:
    """audio: by item."""

    def __init__(self, url: str):
        self._playback = PlaybackClock(MonotonicClock())
        self._socket = ResumingSocket(SessionOptions(url=url), lambda: self._playback.heard_s)
        self.events: list[dict] = []
        self.ended: set[str] = set()
        self.token = ""
        self.n_resumed = 0
        self.audio: dict[str, bytes] = {}
        self.open, self.close = self._socket.open, self._socket.close

    async def send(self, kind: str, **fields) -> None:
        await self._socket.send({"type": kind, **fields})

    async def until(self, kind: str) -> dict:
        while True:
            event = json.loads(await self._socket.recv())
            self.events.append(event)
            self.n_resumed += event["type"] == "session.resumed"
            if "session" in event:
                self.token = (event["session"].get("resumable") or {}).get("token", "")
            assert event["type"] != "error", event
            if event["type"] == DELTA:
                item_id, pcm = event["item_id"], base64.b64decode(event["delta"])
                if item_id not in self.audio:
                    self._playback = PlaybackClock(MonotonicClock())
                self.audio[item_id] = self.audio.get(item_id, b"") + pcm
                self._playback.packet_received(len(pcm) / 48_000)
            if event["type"] == kind:
                return event

    async def ask(self, text: str) -> dict:
        content = [{"type": "input_text", "text": text}]
        item = {"type": "message", "role": "user", "content": content}
        await self.send("conversation.item.create", item=item)
        await self.send("response.create")
        while True:
            response = (await self.until("response.done"))["response"]
            if response["id"] not in self.ended:  # the end of the one before may come again
                self.ended.add(response["id"])
                return response


@pytest.mark.parametrize("seed", range(8))
async def test_nothing_is_lost_and_nothing_comes_twice(tmp_path, seed):
    draw = random.Random(seed)
    async with AsyncExitStack() as running:
        gateways = []
        for _ in range(N_GATEWAYS):
            one = await running.enter_async_context(gateway(tmp_path, of=EchoOrchestrator))
            gateways.append(one)
        addresses = [one.url.split("/")[2] for one in gateways]
        cutter = Cutter(addresses[0])
        address = await running.enter_async_context(cutter.listening())
        client = Client(f"ws://{address}/v1/realtime")
        await client.open()
        audio = {"input": {"turn_detection": None}}
        settings = {"type": "realtime", "resumable": True, "audio": audio}
        await client.send("session.update", session=settings)
        await client.until("session.updated")

        async def lose() -> None:
            for n in range(1, 100):
                await asyncio.sleep(draw.uniform(LEAST_S, MOST_S))
                while client.n_resumed < n - 1:  # the loss before
                    await asyncio.sleep(0.01)
                # Until it is written, there is nothing to resume.
                await is_kept(
                    gateways[0], lambda: client.token, lambda kept: "head" in kept.records
                )
                cutter.go_to(addresses[n % N_GATEWAYS])
                cutter.cut()

        losing = asyncio.create_task(lose())
        said: list[str] = []
        for n in range(N_TURNS):
            response = await client.ask(f"question {n}")
            said += [f"question {n}"]
            words = reply_to(said)
            said += ["".join(words)]
            [item] = response["output"]
            assert response["status"] == "completed", response
            assert item["content"][0]["transcript"] == said[-1]
            assert client.audio[item["id"]] == b"".join(map(sound_of, range(N_WORDS)))
        losing.cancel()
        await asyncio.gather(losing, return_exceptions=True)
        last = await client.ask("last")
        sessions = [s for one in gateways for s in one.orchestrator.sessions]
        latest = max(sessions, key=lambda session: session.epoch)
        assert [item.parts[0].text for item in latest.turns[-1].history] == [*said, "last"]
        keys = [item.key for item in latest.turns[-1].history]
        assert len(keys) == len({*keys})
        assert latest.n_turns > N_TURNS and latest.epoch >= 3
        ended = Counter(e["response"]["id"] for e in client.events if e["type"] == "response.done")
        assert last["id"] in ended and len(ended) == N_TURNS + 1
        await client.close()
