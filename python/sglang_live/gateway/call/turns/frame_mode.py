"""Frame mode: the user's audio is prefilled frame by frame, and a few tokens follow each frame.

In: the user's audio as it comes. Out: one report for each frame.
Owner: one FrameMode per connection, with a task while the mode is on. The prompt begins with the
conversation so far; frames never become items. What leaves the session's window leaves the history
here too, and so do the oldest frames when the conversation is full.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from sglang_live.aio import background
from sglang_live.core import (
    INPUT_RATE_HZ,
    AudioPart,
    HistoryItem,
    TranscriptDelta,
    TurnDone,
)
from sglang_live.errors import LiveError, StageFailedError
from sglang_live.gateway.call.conversation.conversation import KEEP_WHEN_FULL
from sglang_live.gateway.call.ports import CallPort, FrameReport
from sglang_live.gateway.call.responses.turn_runner import TurnRunner
from sglang_live.gateway.call.settings import FrameSettings, SessionConfig
from sglang_live.gateway.errors import ClientEventError, internal_error
from sglang_live.gateway.parts import GatewayParts
from sglang_live.ids import new_id
from sglang_live.interaction.input_buffer import InputBuffer

log = logging.getLogger(__name__)

# Frames that may wait behind a late one. Older ones are dropped: their tokens would come too late.
_MAX_WAITING = 4
# Audio of the frames that count as one response: each frame makes only a few tokens.
_AUDIO_PER_RESPONSE_S = 10.0
_SAMPLES_PER_MS = INPUT_RATE_HZ // 1000
# Audio of frames that is not packed, in a thread between two frames.
_RAW_S = 2.0


class NoTurnsError(ClientEventError):
    def __init__(self) -> None:
        message = "There are no turns in frame mode: every frame is prefilled by itself."
        super().__init__(message, code="frame_mode", param="type")


@dataclass(frozen=True, slots=True, eq=False)
class _Frame:
    """
    start, end: position in the session's audio, in samples.
    due_at_s: when its last sample came.
    n_missing: frames that would have fitted into the time before it in which no audio came.
    """

    index: int
    audio: AudioPart
    start: int
    end: int
    due_at_s: float
    n_missing: int


@dataclass(eq=False)
class FrameMode:
    """admit: counts one more response; raises RateLimitError or DrainingError."""

    parts: GatewayParts
    turn_runner: TurnRunner
    port: CallPort
    admit: Callable[[], object]
    _config: SessionConfig = field(init=False)  # from the first configure() on
    _settings: FrameSettings | None = None
    _task: asyncio.Task[None] | None = None
    _waiting: deque[_Frame] = field(default_factory=deque)
    _frame_came: asyncio.Event = field(default_factory=asyncio.Event)
    _before: tuple[HistoryItem, ...] = ()  # the conversation, which is counted as its own
    _history: list[HistoryItem] = field(default_factory=list)  # of the frames
    _held_bytes: int = 0
    _admitted_s: float = 0.0  # audio that the last counted response still covers
    _n_frames: int = 0
    _start: int = 0  # of the frame that comes next, in samples
    _end: int = 0
    _last_due_s: float | None = None

    def __post_init__(self) -> None:
        self._session = self.turn_runner.session

    @property
    def on(self) -> bool:
        return self._settings is not None

    def configure(self, config: SessionConfig, now_sample: int) -> None:
        """Start, change or end the mode. now_sample: end of the session's audio so far."""
        self._config = config
        settings = config.frames
        if settings == self._settings:
            return
        was_on = self.on
        self._settings = settings
        while self._waiting:
            self._report(self._waiting.popleft(), "dropped")
        if settings is None:
            self._stop()
            return
        first_s = self._session.join_frames(settings.frame_s)
        self._start = now_sample
        self._end = now_sample + round(first_s * INPUT_RATE_HZ)
        self._last_due_s = None
        if not was_on:
            self._task = background(self._run(), "frames")

    def grow(self, buffer: InputBuffer) -> None:
        """Take complete frames out of the buffer, which has more audio now."""
        settings = self._settings
        assert settings is not None
        while buffer.end_sample >= self._end:
            now_s = self.parts.clock.now_s()
            audio = buffer.take(self._start, self._end)
            n_missing = self._count_missing(now_s, settings.frame_s)
            frame = _Frame(self._n_frames, audio, self._start, self._end, now_s, n_missing)
            self._n_frames += 1
            self._start = self._end
            self._last_due_s = now_s
            self._end += settings.frame_ms * _SAMPLES_PER_MS
            self._waiting.append(frame)
            if len(self._waiting) > _MAX_WAITING:
                self._report(self._waiting.popleft(), "dropped")
            self._frame_came.set()

    def clear(self, now_sample: int) -> None:
        """Drop the audio of the incomplete frame; the next one starts at now_sample."""
        if self._settings is not None:
            self._start = now_sample
            self._end = now_sample + self._settings.frame_ms * _SAMPLES_PER_MS

    async def close(self) -> None:
        self._settings = None
        if task := self._stop():
            await asyncio.gather(task, return_exceptions=True)

    def _stop(self) -> asyncio.Task[None] | None:
        task, self._task = self._task, None
        self._session.leave_frames()
        if task is not None:
            task.cancel()
        self._hold([])
        return task

    def _count_missing(self, now_s: float, frame_s: float) -> int:
        if self._last_due_s is None:
            return 0
        n = max(0, round((now_s - self._last_due_s) / frame_s) - 1)
        self.parts.metrics.frames_missing.inc(n)
        return n

    # --- turns ---

    async def _run(self) -> None:
        await self.turn_runner.until_idle()
        self._before = self.turn_runner.request(self._config).history
        while True:
            while not self._waiting:
                self._frame_came.clear()
                await self._frame_came.wait()
            assert self._settings is not None  # the task ends with the mode
            await self._run_frame(self._waiting.popleft(), self._settings)

    async def _run_frame(self, frame: _Frame, settings: FrameSettings) -> None:
        heard = HistoryItem(key=new_id("key"), role="user", parts=(frame.audio,))
        try:
            done, text = await self._run_turn(heard, settings)
        except asyncio.CancelledError:
            self._report(frame, "dropped")
            raise
        except LiveError as error:
            log.warning("frame_failed session=%s code=%s", self._session.session_id, error.code)
            self._report(frame, "empty", error=error)
            return
        except Exception:
            log.exception("frame_crashed session=%s", self._session.session_id)
            self._report(frame, "empty", error=internal_error())
            return
        gone = set(done.gone)
        self._before = tuple(item for item in self._before if item.key not in gone)
        self._hold([i for i in (*self._history, heard, done.item) if i.key not in gone])
        latency_s = self.parts.clock.now_s() - frame.due_at_s
        self.parts.metrics.frame_latency_s.observe(latency_s)
        self._report(
            frame,
            "late" if latency_s > settings.frame_s else "on_time",
            text=text,
            output_tokens=done.usage.output_text_tokens,
            latency_ms=round(1000 * latency_s, 1),
        )
        await self._pack()

    def _hold(self, history: list[HistoryItem]) -> None:
        """Keep these items of frames."""
        before, self._held_bytes = self._held_bytes, sum(item.size_bytes for item in history)
        self._history = history
        self.parts.item_budget.take(self._held_bytes - before)

    def _drop_oldest_if_full(self) -> None:
        max_bytes = self.parts.config.sessions.max_conversation_bytes
        if self._held_bytes <= max_bytes and not self.parts.item_budget.over:
            return
        most_bytes = KEEP_WHEN_FULL * min(self._held_bytes, max_bytes)
        n_before = len(self._history)
        while self._held_bytes > most_bytes:
            self._hold(self._history[1 + len(self._history) // 8 :])
        self.parts.metrics.items_dropped.labels("full").inc(n_before - len(self._history))

    async def _pack(self) -> None:
        raw = [item for item in self._history if item.raw_s]
        if sum(item.raw_s for item in raw) <= _RAW_S:
            return
        packed = await asyncio.to_thread(lambda: [i.with_audio(AudioPart.packed) for i in raw])
        by_key = {item.key: item for item in packed}
        self._hold([by_key.get(item.key, item) for item in self._history])

    async def _run_turn(self, heard: HistoryItem, settings: FrameSettings) -> tuple[TurnDone, str]:
        if self._admitted_s <= 0:
            self.admit()
            self._admitted_s += _AUDIO_PER_RESPONSE_S
            self._drop_oldest_if_full()  # not at each frame: the model's session is built anew
        self._admitted_s -= settings.frame_s
        request = replace(
            self.turn_runner.request(self._config),
            history=(*self._before, *self._history, heard),
            wants_audio=False,
            max_output_tokens=settings.max_tokens,
            frame_s=settings.frame_s,
        )
        deltas: list[str] = []
        done: TurnDone | None = None
        async with aclosing(self._session.respond(request)) as events:
            async for event in events:
                if isinstance(event, TranscriptDelta):
                    deltas.append(event.text)
                elif isinstance(event, TurnDone):
                    done = event
        if done is None:
            raise StageFailedError("The frame ended without a result.")
        return done, "".join(deltas)

    def _report(self, frame: _Frame, outcome: str, **facts: Any) -> None:
        self.parts.metrics.frames.labels(outcome).inc()
        report = FrameReport(
            index=frame.index,
            start_ms=frame.start // _SAMPLES_PER_MS,
            end_ms=frame.end // _SAMPLES_PER_MS,
            n_missing=frame.n_missing,
            outcome=outcome,
            **facts,
        )
        self.port.frame_done(report)
