"""A Live session on a simulated clock, and a client that counts its ticks."""

import asyncio
import base64
import json
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from sglang_live.clock import SimClock
from sglang_live.gateway.live.route import live_link
from sglang_live.gateway.live.sidebands import LiveSessions
from test.protocol.live import LiveEvents
from test.unit.gateway.fakes import Client, FakeOrchestrator, MemoryWire, services

AUDIO = "session.output_audio.delta"
SAID = "session.output_transcript.delta"
HEARD = "session.input_transcript.delta"
TICK_S = 0.1


class InlineThread(ThreadPoolExecutor):
    """A thread in whose work no time passes."""

    def submit(self, work, /, *args, **kwargs):
        done = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


class LiveWire(MemoryWire):
    def __init__(self):
        super().__init__()
        self.seen = LiveEvents()


class LiveClient(Client):
    """
    events: all that came so far.
    """

    def __init__(self, wire: LiveWire, world: "LiveWorld"):
        super().__init__(wire)
        self.events: list[dict[str, Any]] = []
        self._world = world

    def begin(self, **session: Any) -> None:
        self.send("session.start", session={"model": "fake-omni", **session})

    def append(self, pcm: bytes) -> None:
        self.send("session.input_audio.append", audio=base64.b64encode(pcm).decode())

    async def ticks(self, n: int, microphone: bytes = b"") -> list[dict[str, Any]]:
        """Let n ticks pass. Returns the events that came.

        microphone: PCM of 24 kHz, sent at the pace of time; silence follows it.
        """
        first = len(self.events)
        for tick in range(n):
            begin = tick * 4800
            piece = microphone[begin : begin + 4800]
            if microphone:
                self.append(piece + bytes(4800 - len(piece)))
            await self.rest()
            self._world.clock.advance(TICK_S)
            await self.rest()
        return self.events[first:]

    async def rest(self) -> None:
        """Let everything run that needs no time."""
        for _ in range(60):
            await asyncio.sleep(0)
        while not self.wire.outgoing.empty():
            self.events.append(self.wire.outgoing.get_nowait())

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] in kinds]


def sound_of(events: list[dict[str, Any]]) -> list[bytes]:
    """The audio of each tick."""
    return [base64.b64decode(event["delta"]) for event in events if event["type"] == AUDIO]


def is_zero(audio: bytes) -> bool:
    return not any(audio)


def spoken_ticks(events: list[dict[str, Any]]) -> list[int]:
    """Numbers of the ticks with sound."""
    return [n for n, audio in enumerate(sound_of(events)) if not is_zero(audio)]


def text_of(events: list[dict[str, Any]], kind: str = SAID) -> str:
    return "".join(event["delta"] for event in events if event["type"] == kind)


def loudest(audio: bytes) -> int:
    return int(np.abs(np.frombuffer(audio, "<i2").astype(int)).max())


class LiveWorld:
    def __init__(self, *scripts, **config):
        self.clock = SimClock(50.0)
        self.orchestrator = FakeOrchestrator([*scripts])
        self.shared = services(self.orchestrator, self.clock, **config)
        self.shared.echo_thread = InlineThread()
        self.wire = LiveWire()
        self.sessions = LiveSessions()

    @property
    def session(self):
        return self.orchestrator.session

    @asynccontextmanager
    async def connect(self, *, begins: bool = True, **session: Any):
        """A client whose session has started. It leaves at the end."""
        asyncio.get_running_loop().set_default_executor(InlineThread())
        serving = asyncio.create_task(live_link(self.wire, self.shared, self.sessions).run())
        client = LiveClient(self.wire, self)
        if begins:
            client.begin(**session)
        await client.rest()
        yield client
        client.send_raw(None)
        async with asyncio.timeout(30):
            await serving
        assert not self.wire.faults, self.wire.faults
        assert self.session.running == 0
        assert self.session.n_closed == 1

    def value(self, name: str, **labels: str) -> float | None:
        name = f"sglang_live_gateway_{name}"
        return self.shared.metrics.registry.get_sample_value(name, labels)


def errors(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event["error"] for event in events if event["type"] == "error"]


def as_json(event: dict[str, Any]) -> str:
    return json.dumps(event)
