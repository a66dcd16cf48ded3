"""Fakes of the gateway's surroundings: an orchestrator with scripted turns, and a client."""

import asyncio
import base64
import json
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry
from pydantic import ValidationError
from starlette.applications import Starlette

from sglang_live.capacity.best_effort import BestEffort
from sglang_live.capacity.control import Capacity
from sglang_live.clock import Clock, MonotonicClock
from sglang_live.core import (
    OUTPUT_RATE_HZ,
    AudioDelta,
    BegunTurn,
    HistoryItem,
    PromptContent,
    PromptSize,
    TextPart,
    TranscriptDelta,
    TurnDone,
    TurnEvent,
    TurnRequest,
    Usage,
)
from sglang_live.errors import CapacityError
from sglang_live.gateway.app import build_app
from sglang_live.gateway.auth import KeyConfig
from sglang_live.gateway.config import GatewayConfig
from sglang_live.gateway.draining import Drain
from sglang_live.gateway.http.health import Health
from sglang_live.gateway.parts import GatewayAddition, GatewayParts
from sglang_live.gateway.rate_limits import ClientLimits
from sglang_live.gateway.realtime.route import realtime_link
from sglang_live.interaction.silero import (
    CONTEXT_SAMPLES,
    SpeechModel,
    SpeechScores,
    SpeechState,
    SpeechWindows,
)
from sglang_live.journal.journal import Journal
from sglang_live.kv.retention import RetentionConfig
from sglang_live.orchestrator.suspects import Suspects
from sglang_live.telemetry.metrics import GatewayMetrics
from test.protocol import ServerEvents

MODEL = "fake-omni"
# A guard: nothing that a test waits for takes as long, also on a busy machine.
_PATIENCE_S = 30.0
_SMALLEST_CLIENT_FRAME_BYTES = 1024 * 1024

# What a scripted turn does, in order: yield an event, wait for a gate, or fail.
Step = TurnEvent | asyncio.Event | Exception


def tone(duration_ms: float, rate_hz: int = OUTPUT_RATE_HZ) -> bytes:
    t = np.arange(int(duration_ms * rate_hz / 1000)) / rate_hz
    return (8000 * np.sin(2 * np.pi * 300 * t)).astype("<i2").tobytes()


def voice(duration_ms: float) -> bytes:
    """Of the user: unlike tone(), which the agent's loudspeaker plays."""
    noise = np.random.default_rng(7).normal(0, 3000, int(duration_ms * OUTPUT_RATE_HZ / 1000))
    return noise.clip(-20_000, 20_000).astype("<i2").tobytes()


def done(text: str = "", **fields: Any) -> TurnDone:
    item = HistoryItem(
        key="reply:" + text, role="assistant", parts=(TextPart(text),), token_ids=(1, 2, 3)
    )
    usage = Usage(input_text_tokens=5, input_audio_tokens=7, output_text_tokens=3, cached_tokens=2)
    defaults = {"status": "completed", "reason": None, "item": item, "usage": usage}
    return TurnDone(**{**defaults, **fields})


def spoken(text: str, duration_ms: int = 400) -> list[Step]:
    """A complete spoken turn: all words, then audio in pieces of 80 ms."""
    words = text.split(" ")
    words = [word + " " for word in words[:-1]] + words[-1:]
    steps: list[Step] = [TranscriptDelta(word) for word in words]
    audio = [AudioDelta(tone(80)) for _ in range(duration_ms // 80)]
    return [*steps, *audio, done(text)]


def paced(text: str, n_frames: int, end: Step | None = None) -> list[Step]:
    """A turn of one token per word, ids from 1, whose audio comes in frames of 80 ms.

    end: last step, in place of the completion.
    """
    words = [word + " " for word in text.split(" ")[:-1]] + text.split(" ")[-1:]
    steps: list[Step] = [TranscriptDelta(word, n + 1) for n, word in enumerate(words)]
    steps += [AudioDelta(tone(80)) for _ in range(n_frames)]
    return [*steps, end or done(item=history_item_of(text), n_frames=n_frames)]


def history_item_of(text: str) -> HistoryItem:
    ids = tuple(range(1, 1 + len(text.split(" "))))
    return HistoryItem(
        key="reply:" + text, role="assistant", parts=(TextPart(text),), token_ids=ids
    )


@dataclass(eq=False)
class FakeSession:
    """
    on_interrupt: last steps of an interrupted turn; None: the policy is off.
    playback, speeds: arguments of report_playback.
    underruns_s: arguments of report_underrun.
    speculation_refusal: returned by speculation_refused.
    speculations: arguments of end_speculation.
    n_speech: how often report_speech was called, except for dismissals.
    prefilled: turn prefills.
    frame_modes: frame length of each join_frames; None for leave_frames.
    call: that duplex() returns. call_settings: its arguments.
    epoch, at: arguments of open_session. restored, n_before: arguments of restore.
    said, n_said: text of the latest turn, and its tokens.
    """

    session_id: str
    scripts: list[list[Step]]
    turns: list[TurnRequest] = field(default_factory=list)
    prefilled: list[TurnRequest] = field(default_factory=list)
    wind_down: asyncio.Event | None = None
    on_interrupt: list[Step] | None = None
    playback: list[tuple[float, bool]] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    underruns_s: list[float] = field(default_factory=list)
    frame_modes: list[float | None] = field(default_factory=list)
    n_speech: int = 0
    speculation_refusal: str = ""
    speculations: list[bool] = field(default_factory=list)
    n_interrupted: int = 0
    running: int = 0
    n_cancelled: int = 0
    n_closed: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    admitted: bool = True
    call: Any = None
    call_settings: dict[str, Any] = field(default_factory=dict)
    epoch: int = 0
    at: dict[str, str] | None = None
    said: str = ""
    n_said: int = 0
    restored: list[HistoryItem] = field(default_factory=list)
    n_before: int = 0
    on_stream_event: Callable[[str, str, float], None] = lambda stage, what, buffered_s: None
    _interrupted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def n_turns(self) -> int:
        return self.n_before + len(self.turns)

    @property
    def addresses(self) -> dict[str, str]:
        return {"thinker": "tcp://10.0.0.1:9000"}

    def begun(self) -> BegunTurn | None:
        ids = tuple(range(1, 1 + self.n_said))
        return BegunTurn(ids=ids, said=self.said, seed=len(self.turns)) if self.turns else None

    def restore(self, history: Iterable[HistoryItem], n_turns: int) -> None:
        self.restored, self.n_before = list(history), n_turns

    async def respond(self, turn: TurnRequest) -> AsyncIterator[TurnEvent]:
        self.turns.append(turn)
        self.said, self.n_said = (turn.begun.said, len(turn.begun.ids)) if turn.begun else ("", 0)
        if not turn.stateless:
            assert self.running == 0, "two turns of the conversation at once"
            self.running += 1
            self._interrupted = asyncio.Event()
        finished = False
        try:
            steps = deque(self.scripts.pop(0) if self.scripts else spoken("All right."))
            ending = turn.stateless
            while steps:
                step = steps.popleft()
                if isinstance(step, asyncio.Event):
                    await (step.wait() if ending else self._until_interrupted(step))
                if self._interrupted.is_set() and not ending:
                    ending, steps = True, deque(self.on_interrupt)
                elif isinstance(step, asyncio.Event):
                    continue
                elif isinstance(step, Exception):
                    finished = True
                    raise step
                else:
                    if isinstance(step, TranscriptDelta):
                        self.said, self.n_said = self.said + step.text, step.n_tokens
                    yield step
            finished = True
        finally:
            if not finished:
                self.n_cancelled += 1
                if self.wind_down:
                    await self.wind_down.wait()
            if not turn.stateless:
                self.running -= 1

    async def _until_interrupted(self, gate: asyncio.Event) -> None:
        waits = [asyncio.create_task(event.wait()) for event in (gate, self._interrupted)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def duplex(self, **settings: Any) -> Any:
        self.call_settings = settings
        return self.call

    def watch(self, on_stream_event) -> None:
        self.on_stream_event = on_stream_event

    def interrupt(self) -> bool:
        if self.on_interrupt is None or not self.running:
            return False
        self.n_interrupted += 1
        self._interrupted.set()
        return True

    def speculation_refused(self) -> str:
        return self.speculation_refusal

    def end_speculation(self, *, confirmed: bool) -> None:
        self.speculations.append(confirmed)

    def report_playback(self, heard_s: float, playing: bool, speed: float) -> None:
        self.playback.append((heard_s, playing))
        self.speeds.append(speed)

    def report_underrun(self, silent_s: float) -> None:
        self.underruns_s.append(silent_s)

    def prefill_turn(self, turn: TurnRequest) -> bool:
        if self.running:
            return False
        self.prefilled.append(turn)
        return True

    def join_frames(self, frame_s: float) -> float:
        self.frame_modes.append(frame_s)
        return frame_s

    def leave_frames(self) -> None:
        self.frame_modes.append(None)

    def report_speech(self, speaks: bool = True) -> None:
        self.n_speech += speaks

    def report_next_use(
        self, to_play_s: float, response_gap_s: float | None, observed_gap_s: float | None
    ) -> None:
        """No test of the gateway reads it."""

    async def close(self) -> None:
        self.n_closed += 1
        self.closed.set()


@dataclass(eq=False)
class FakeOrchestrator:
    """
    scripts: steps of the next session's turns, one list per turn.
    native_bounds: retention of sessions of SGLang's own API.
    may_bound: set to let retain_native return; None: it returns at once.
    most_tokens: limit of a prompt, of which three quarters may be instructions and tools; a
        character is a token, a second of audio ten. None: everything fits.
    measured: arguments of measure.
    n_more: sessions that would be admitted.
    """

    scripts: list[list[Step]] = field(default_factory=list)
    model_name: str = MODEL
    voices: tuple[str, ...] = ("ada", "bob")
    duplex_s: float = 0.0
    own_voice: bool = False
    call: Any = None  # of its sessions
    refuse_with: Exception | None = None
    sessions: list[FakeSession] = field(default_factory=list)
    native_bounds: dict[str, RetentionConfig] = field(default_factory=dict)
    may_bound: asyncio.Event | None = None
    most_tokens: int | None = None
    measured: list[PromptContent] = field(default_factory=list)
    measure_fails_with: Exception | None = None
    n_more: int = 0

    async def measure(self, content: PromptContent) -> PromptSize | None:
        self.measured.append(content)
        if self.measure_fails_with:
            raise self.measure_fails_with
        if self.most_tokens is None:
            return None
        return PromptSize(
            header=len(content.instructions) + sum(map(len, content.functions)),
            items=content.n_characters + sum(int(10 * clip_s) for clip_s in content.clips_s),
            most_header=self.most_tokens * 3 // 4,
            most=self.most_tokens,
        )

    def capacity_now(self) -> Capacity:
        pools = {"thinker": (0.25, math.inf), "talker": (0.5, 12.3456)}
        return Capacity(
            n_sessions=1, limit=4, n_more=self.n_more, why="full soon", share=0.5, pools=pools
        )

    def best_effort_now(self) -> BestEffort | None:
        return None

    async def retain_native(self, session_id: str, retention: RetentionConfig) -> None:
        if self.refuse_with:
            raise self.refuse_with
        if self.may_bound:
            await self.may_bound.wait()
        self.native_bounds[session_id] = retention

    async def open_session(
        self,
        session_id: str,
        *,
        admitted: bool = True,
        epoch: int = 0,
        at: dict[str, str] | None = None,
    ) -> FakeSession:
        if self.refuse_with:
            raise self.refuse_with
        session = FakeSession(session_id, self.scripts)
        session.admitted, session.call = admitted, self.call
        session.epoch, session.at = epoch, at
        self.sessions.append(session)
        return session

    @property
    def session(self) -> FakeSession:
        return self.sessions[-1]

    @property
    def turns(self) -> list[TurnRequest]:
        return self.session.turns


def full() -> CapacityError:
    return CapacityError("full: 2 of 2 sessions", retry_after_s=3)


class LoudnessModel:
    """A speech model for tests: loud audio is speech, quiet audio is not."""

    def initial_state(self) -> SpeechState:
        return SpeechState(np.zeros(1), np.zeros(1))

    def score(self, asked: Sequence[SpeechWindows]) -> list[SpeechScores]:
        return [(self._probabilities(windows), state) for windows, state in asked]

    def _probabilities(self, windows: np.ndarray) -> np.ndarray:
        loud = np.abs(windows[:, CONTEXT_SAMPLES:]).mean(axis=1) > 0.05
        return np.where(loud, 0.95, 0.01).astype(np.float32)


class InlineScorer:
    """As SpeechScorer, in the event loop: without a thread no time passes."""

    def __init__(self, model: SpeechModel):
        self.model = model

    async def score(self, windows: np.ndarray, state: SpeechState) -> SpeechScores:
        await asyncio.sleep(0)
        [scored] = self.model.score([(windows, state)])
        return scored

    def close(self) -> None:
        """There is no thread."""


class MemoryWire:
    """The socket of a client in the same process. It checks every event strictly.

    audio_left: audio packets until the client stops reading (clears `readable`); None: it reads on.
    is_lost: set before the end of `incoming` if the client leaves without a close frame.
    """

    def __init__(self):
        self.is_lost = False
        self.seen = ServerEvents()
        self.faults: list[Exception] = []
        self.audio_left: int | None = None
        self.incoming: asyncio.Queue[str | bytes | None] = asyncio.Queue()
        self.outgoing: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.frames: list[str] = []
        self.closed: tuple[int, str] | None = None
        self.readable = asyncio.Event()
        self.readable.set()

    async def receive(self) -> str | bytes | None:
        return await self.incoming.get()

    async def send(self, frame: str) -> None:
        await self.readable.wait()
        event = json.loads(frame)
        try:
            self.seen.see(event)
        except (AssertionError, ValidationError) as fault:
            self.faults.append(fault)  # the server treats this exception as one of the socket
            raise
        assert len(frame) < _SMALLEST_CLIENT_FRAME_BYTES
        self.frames.append(frame)
        self.outgoing.put_nowait(event)
        if self.audio_left and event["type"] == "response.output_audio.delta":
            self.audio_left -= 1
            if not self.audio_left:
                self.readable.clear()

    async def close(self, code: int, reason: str) -> None:
        self.closed = (code, reason)


class Client:
    """A client that writes events and reads the server's events, in order."""

    def __init__(self, wire: MemoryWire):
        self.wire = wire

    def send(self, event_type: str, **fields: Any) -> None:
        self.send_raw(json.dumps({"type": event_type, **fields}))

    def send_raw(self, frame: str | bytes | None) -> None:
        self.wire.incoming.put_nowait(frame)

    def append(self, pcm: bytes) -> None:
        self.send("input_audio_buffer.append", audio=base64.b64encode(pcm).decode())

    def update(self, **session: Any) -> None:
        self.send("session.update", session={"type": "realtime", **session})

    def turn_detection(self, setting: dict[str, Any] | None) -> None:
        self.update(audio={"input": {"turn_detection": setting}})

    def say(self, text: str, item_id: str | None = None, **fields: Any) -> None:
        item = {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": text}],
        }
        if item_id:
            item["id"] = item_id
        self.send("conversation.item.create", item=item, **fields)

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(_PATIENCE_S):
            return await self.wire.outgoing.get()

    async def expect(self, event_type: str) -> dict[str, Any]:
        """The next event, which must be of this type."""
        event = await self.next()
        assert event["type"] == event_type, event
        return event

    async def until(self, event_type: str) -> list[dict[str, Any]]:
        """All events up to and including the next one of this type."""
        events = [await self.next()]
        while events[-1]["type"] != event_type:
            events.append(await self.next())
        return events

    async def find(self, event_type: str) -> dict[str, Any]:
        return (await self.until(event_type))[-1]

    async def settle(self) -> list[dict[str, Any]]:
        """All events before the response to an event that is sent now."""
        self.send("session.update", session={"type": "realtime"})
        return (await self.until("session.updated"))[:-1]


def config_of(**values: Any) -> GatewayConfig:
    """By the names of settings alone, without those of their parts. Any page may ask."""
    keys, limits = KeyConfig(allow_anonymous=True), ClientLimits(idle_session_s=0.0)
    config = GatewayConfig(keys=keys, limits=limits)
    parts = {one.name: getattr(config, one.name) for one in fields(config)}
    inner = {
        one.name: f"{name}.{one.name}"
        for name, part in parts.items()
        if is_dataclass(part)
        for one in fields(part)
    }
    return config.changed({inner.get(name, name): value for name, value in values.items()})


def app_of(
    orchestrator: FakeOrchestrator,
    *,
    stages: dict[str, str] | None = None,
    native_url: str | None = None,
    speech_model: SpeechModel | None = None,
    suspects: Suspects | None = None,
    drain: Drain | None = None,
    journal: Journal | None = None,
    additions: Iterable[Callable[[GatewayParts], GatewayAddition | None]] = (),
    **config: Any,
) -> Starlette:
    stages = {"thinker": "serving"} if stages is None else stages
    return build_app(
        orchestrator,
        config=config_of(**config),
        native_url=native_url,
        health=lambda: Health(stages),
        speech_model=speech_model or LoudnessModel(),
        suspects=suspects,
        drain=drain,
        journal=journal,
        additions=additions,
    )


def services(
    orchestrator: FakeOrchestrator, clock: Clock | None = None, **config: Any
) -> GatewayParts:
    shared = GatewayParts(
        orchestrator=orchestrator,
        config=config_of(**config),
        speech_model=LoudnessModel(),
        clock=clock or MonotonicClock(),
        metrics=GatewayMetrics(CollectorRegistry()),
    )
    shared.scorer = InlineScorer(shared.speech_model)
    return shared


@asynccontextmanager
async def connected(
    orchestrator: FakeOrchestrator,
    shared: GatewayParts | None = None,
    protocol: dict[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[Client]:
    """A client that has read session.created. It leaves at the end and checks the cleanup.

    protocol: fields of RealtimeProtocol.
    """
    wire = MemoryWire()
    connection = realtime_link(wire, shared or services(orchestrator, **config), **(protocol or {}))
    serving = asyncio.create_task(connection.run())
    client = Client(wire)
    await client.expect("session.created")
    yield client
    client.send_raw(None)
    async with asyncio.timeout(_PATIENCE_S):
        await serving
    assert not wire.faults
    assert orchestrator.session.running == 0
    assert orchestrator.session.n_closed == 1


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


def audio_of(events: list[dict[str, Any]]) -> bytes:
    deltas = [e["delta"] for e in events if e["type"] == "response.output_audio.delta"]
    return b"".join(base64.b64decode(delta) for delta in deltas)
