"""A client whose socket is cut at chosen moments, and which resumes its session.

Time is simulated: the client plays what it has got while it ticks, and stands still while it is
away.
"""

import asyncio
import base64
import json
import random
from collections import deque
from typing import Any

from sglang_live.clock import SimClock
from sglang_live.core import OUTPUT_RATE_HZ
from sglang_live.gateway.realtime.route import realtime_link
from test.protocol import ServerEvents
from test.unit.gateway.fakes import FakeOrchestrator, MemoryWire, services

DELTA = "response.output_audio.delta"
TICK_S = 0.08
_TICK_BYTES = round(TICK_S * OUTPUT_RATE_HZ) * 2
_BYTES_PER_MS = 2 * OUTPUT_RATE_HZ // 1000
# Before the server sees that a socket is lost. After two seconds without audio a turn is over.
_MOST_TICKS_UNSEEN = 18
_MOST_TICKS_AWAY = 60
# What the server does meanwhile takes a few rounds of its event loop.
_ROUNDS = 40


class _Unchecked:
    def see(self, event: dict[str, Any]) -> None:
        """What a lost socket was sent may come again."""


class LossyWire(MemoryWire):
    def __init__(self):
        super().__init__()
        self.seen = _Unchecked()
        self.is_cut = False

    async def send(self, frame: str) -> None:
        if self.is_cut:
            raise ConnectionResetError
        await super().send(frame)

    def cut(self) -> None:
        self.is_cut = self.is_lost = True
        self.incoming.put_nowait(None)


class Gates:
    """Moments of the scripts for which the model waits; each tick opens the next."""

    def __init__(self):
        self.waiting: list[asyncio.Event] = []

    def __call__(self) -> asyncio.Event:
        self.waiting.append(asyncio.Event())
        return self.waiting[-1]

    def open_next(self) -> None:
        shut = (gate for gate in self.waiting if not gate.is_set())
        if gate := next(shut, None):
            gate.set()


class LossyWorld:
    def __init__(self, scripts: list, gates: Gates, **config: Any):
        self.clock = SimClock(50.0)
        self.orchestrator = FakeOrchestrator(scripts)
        self.shared = services(self.orchestrator, self.clock, **config)
        self.gates = gates

    def pass_time(self) -> None:
        self.clock.advance(TICK_S)
        self.gates.open_next()

    def value(self, name: str, **labels: str) -> float | None:
        name = f"sglang_live_gateway_{name}"
        return self.shared.metrics.registry.get_sample_value(name, labels)


class LossyClient:
    """
    cuts: numbers of the steps before which the socket is cut. A step is an event that the client
        sends or reads, or a tick.
    events: all that it got, once each.
    audio: of each item, as far as it was heard or is to be played.
    """

    def __init__(self, world: LossyWorld, cuts: tuple[int, ...] = (), seed: int = 0):
        self._world = world
        self._cuts = sorted(cuts)
        self._random = random.Random(seed)
        self._rules = ServerEvents()
        self._sent: list[str] = []
        self._played: dict[str, int] = {}
        self._cut_off: set[str] = set()
        self._came_again: deque[dict[str, Any]] = deque()
        self._newest: str | None = None
        self._last_id: str | None = None
        self._token = ""
        self.n_steps = 0
        self.n_cuts = 0
        self.events: list[dict[str, Any]] = []
        self.audio: dict[str, bytearray] = {}

    async def __aenter__(self) -> "LossyClient":
        self.wire = LossyWire()
        self.serving = asyncio.create_task(realtime_link(self.wire, self._world.shared).run())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.wire.incoming.put_nowait(None)
        async with asyncio.timeout(30):
            await self.serving

    async def send(self, kind: str, **fields: Any) -> None:
        await self._step()
        self._sent.append(json.dumps({"type": kind, **fields}))
        self.wire.incoming.put_nowait(self._sent[-1])

    async def append(self, pcm: bytes, step_ms: int = 100) -> None:
        size = step_ms * _BYTES_PER_MS
        for at in range(0, len(pcm), size):
            audio = base64.b64encode(pcm[at : at + size]).decode()
            await self.send("input_audio_buffer.append", audio=audio)

    async def until(self, kind: str, *, ticks: bool = False) -> dict[str, Any]:
        """ticks: time passes while the event does not come."""
        while True:
            await self._step()
            if self._came_again:
                event = self._came_again.popleft()
            else:
                event = await self._next(ticks)
                self._see(event)
            if event["type"] == kind:
                return event

    async def tick(self, n: int = 1) -> None:
        for _ in range(n):
            await self._step()
            self._world.pass_time()
            self._play()
            await _rounds()

    def played_ms(self, item_id: str) -> int:
        return self._played.get(item_id, 0) // _BYTES_PER_MS

    async def settle(self) -> None:
        await self.send("session.update", session={"type": "realtime"})
        await self.until("session.updated")

    async def _next(self, ticks: bool) -> dict[str, Any]:
        async with asyncio.timeout(30):
            while ticks and self.wire.outgoing.empty():
                await _rounds()
                if self.wire.outgoing.empty():
                    self._world.pass_time()
                    self._play()
            return await self.wire.outgoing.get()

    def _see(self, event: dict[str, Any], *, again: bool = False) -> None:
        self._last_id = event["event_id"]
        if resumable := event.get("session", {}).get("resumable"):
            self._token = resumable["token"]
        if event["type"] == DELTA:
            item_id = self._newest = event["item_id"]
            if item_id not in self._cut_off:
                self.audio.setdefault(item_id, bytearray()).extend(base64.b64decode(event["delta"]))
        elif event["type"] == "conversation.item.truncated":
            self._cut_off.add(event["item_id"])
            self._drop_unheard(event["item_id"])
        if event["type"] not in (DELTA, "session.resumed"):
            self.events.append(event)
        if not again:
            self._rules.see(event)

    def _play(self) -> None:
        """One item after another."""
        left = _TICK_BYTES
        for item_id, audio in self.audio.items():
            n_bytes = min(left, len(audio) - self._played.get(item_id, 0))
            self._played[item_id] = self._played.get(item_id, 0) + n_bytes
            left -= n_bytes

    def _drop_unheard(self, item_id: str) -> None:
        del self.audio[item_id][self._played.get(item_id, 0) :]

    async def _step(self) -> None:
        self.n_steps += 1
        if self._cuts and self.n_steps >= self._cuts[0] and self._token:
            self._cuts.pop(0)
            await self._lose()

    async def _lose(self) -> None:
        """Events on their way get lost, in both directions."""
        self.n_cuts += 1
        draw, wire = self._random, self.wire
        if draw.random() < 0.5:
            await _rounds()
        while not wire.incoming.empty():
            wire.incoming.get_nowait()
        is_seen = draw.random() < 0.7  # else the new socket comes before the server sees the loss
        for _ in range(draw.randrange(_MOST_TICKS_UNSEEN)):
            self._world.pass_time()
            await _rounds()
        if is_seen:
            wire.cut()
            await _rounds()
            # The server waits for the close frame of a socket that fails while it sends.
            for _ in range(draw.randrange(_MOST_TICKS_AWAY)):
                self._world.pass_time()
                await _rounds()
        await self._resume()

    async def _resume(self) -> None:
        newest = self._newest
        heard_ms = None if newest is None else self.played_ms(newest)
        if newest is not None:
            self._drop_unheard(newest)
        self.wire = LossyWire()
        call = self._world.shared.resumable_calls.find(self._token, "")
        call.join(self.wire, self._last_id, heard_ms)
        while True:
            async with asyncio.timeout(30):
                event = await self.wire.outgoing.get()
            is_again = event["type"] in (DELTA, "session.resumed")
            self._see(event, again=is_again)
            if is_again:
                self.n_steps += 1
            else:
                self._came_again.append(event)
            if event["type"] == "session.resumed":
                break
        for frame in self._sent[event["events_received"] :]:
            self.wire.incoming.put_nowait(frame)


async def _rounds() -> None:
    for _ in range(_ROUNDS):
        await asyncio.sleep(0)
