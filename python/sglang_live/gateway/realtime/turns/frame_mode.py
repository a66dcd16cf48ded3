"""A caller who is heard frame by frame: each is taken in at its beat, and a few tokens follow it.

In: the caller's audio as it comes. Out: one frame.done for each frame.
Owner: one FrameTurns per connection, with a task while the session is in frame mode. The
conversation so far is the beginning of what the model sees; the frames themselves never become
items. What leaves the session's window is forgotten here, too.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from sglang_live.clock import Clock
from sglang_live.core import (
    INPUT_RATE_HZ,
    AudioPart,
    HistoryItem,
    TranscriptDelta,
    TurnDone,
    TurnRequest,
)
from sglang_live.errors import LiveError, StageFailedError
from sglang_live.gateway.errors import error_body, internal_error
from sglang_live.gateway.ids import new_id
from sglang_live.gateway.realtime.frame_settings import FrameSettings
from sglang_live.gateway.realtime.outbox import Emit
from sglang_live.interaction.input_buffer import InputBuffer
from sglang_live.orchestrator.session import VoiceSession
from sglang_live.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

# Frames that may wait behind one that is late; what was said earlier is not worth hearing then.
_MOST_WAITING = 4
# A frame is a few tokens: so many seconds of them count as one answer, where answers are limited.
_ANSWER_S = 10.0
_SAMPLES_PER_MS = INPUT_RATE_HZ // 1000


@dataclass(frozen=True, slots=True, eq=False)
class _Frame:
    """start, end: in samples of the session's audio. due_at_s: when its last sample came.
    n_missing: frames' worth of time before it in which nothing came."""

    index: int
    audio: AudioPart
    start: int
    end: int
    due_at_s: float
    n_missing: int


class FrameMode:
    """
    Args:
        request: what to ask for when nothing is said: the conversation, and the settings.
        until_idle: returns when no turn of the conversation runs any more.
        may_ask: counts one more answer; raises RateLimitError.
    """

    def __init__(
        self,
        session: VoiceSession,
        emit: Emit,
        clock: Clock,
        metrics: GatewayMetrics,
        request: Callable[[], TurnRequest],
        until_idle: Callable[[], "asyncio.Future[None]"],
        may_ask: Callable[[], object],
    ):
        self._session, self._emit, self._clock = session, emit, clock
        self._metrics, self._request, self._until_idle = metrics, request, until_idle
        self._may_ask, self._granted_s = may_ask, 0.0
        self._mode: FrameSettings | None = None
        self._task: asyncio.Task[None] | None = None
        self._waiting: deque[_Frame] = deque()
        self._news = asyncio.Event()
        self._n_frames = 0
        self._begin = self._end = 0  # of the frame that grows, in samples
        self._last_due_s: float | None = None
        self._history: list[HistoryItem] = []

    @property
    def on(self) -> bool:
        return self._mode is not None

    def configure(self, mode: FrameSettings | None, now_sample: int) -> None:
        """Begin, change or end the mode; now_sample is where the session's audio is."""
        if mode == self._mode:
            return
        was_on, self._mode = self.on, mode
        while self._waiting:
            self._report(self._waiting.popleft(), "dropped")
        if mode is None:
            self._stop()
            return
        first_s = self._session.join_frames(mode.frame_s)
        self._begin = now_sample
        self._end = now_sample + round(first_s * INPUT_RATE_HZ)
        self._last_due_s = None
        if not was_on:
            self._task = asyncio.create_task(self._run(), name="frames")

    def grow(self, buffer: InputBuffer) -> None:
        """More audio has come. What is complete leaves the buffer."""
        assert self._mode is not None
        while buffer.end_sample >= self._end:
            now_s = self._clock.now_s()
            audio = buffer.take(self._begin, self._end)
            frame = _Frame(
                self._n_frames, audio, self._begin, self._end, now_s, self._n_missing(now_s)
            )
            self._n_frames += 1
            self._begin, self._last_due_s = self._end, now_s
            self._end += self._mode.frame_ms * _SAMPLES_PER_MS
            self._waiting.append(frame)
            if len(self._waiting) > _MOST_WAITING:
                self._report(self._waiting.popleft(), "dropped")
            self._news.set()

    def clear(self, now_sample: int) -> None:
        """What has come of the next frame is dropped; that one begins now."""
        if self._mode is not None:
            self._begin = now_sample
            self._end = now_sample + self._mode.frame_ms * _SAMPLES_PER_MS

    async def close(self) -> None:
        self._mode = None
        if task := self._stop():
            await asyncio.gather(task, return_exceptions=True)

    def _stop(self) -> asyncio.Task[None] | None:
        task, self._task = self._task, None
        self._session.leave_frames()
        if task is not None:
            task.cancel()
        return task

    def _n_missing(self, now_s: float) -> int:
        if self._last_due_s is None:
            return 0
        n = max(0, round((now_s - self._last_due_s) / self._mode.frame_s) - 1)
        self._metrics.frames_missing.inc(n)
        return n

    # --- hearing ---

    async def _run(self) -> None:
        await self._until_idle()
        self._history = list(self._request().history)
        while True:
            while not self._waiting:
                self._news.clear()
                await self._news.wait()
            await self._hear(self._waiting.popleft())

    async def _hear(self, frame: _Frame) -> None:
        said = HistoryItem(key=new_id("key"), role="user", parts=(frame.audio,))
        frame_s = self._mode.frame_s
        try:
            done, text = await self._ask(said)
        except asyncio.CancelledError:
            self._report(frame, "dropped")
            raise
        except LiveError as error:
            log.warning("frame_failed session=%s code=%s", self._session.session_id, error.code)
            self._report(frame, "empty", error=error_body(error))
            return
        except Exception:
            log.exception("frame_crashed session=%s", self._session.session_id)
            self._report(frame, "empty", error=error_body(internal_error()))
            return
        gone = set(done.gone)
        self._history = [i for i in (*self._history, said, done.item) if i.key not in gone]
        latency_s = self._clock.now_s() - frame.due_at_s
        self._metrics.frame_latency_s.observe(latency_s)
        outcome = "late" if latency_s > frame_s else "on_time"
        self._report(
            frame,
            outcome,
            text=text,
            output_tokens=done.usage.output_text_tokens,
            latency_ms=round(1000 * latency_s, 1),
        )

    async def _ask(self, said: HistoryItem) -> tuple[TurnDone, str]:
        if self._granted_s <= 0:
            self._may_ask()
            self._granted_s += _ANSWER_S
        self._granted_s -= self._mode.frame_s
        asked = replace(
            self._request(),
            history=(*self._history, said),
            wants_audio=False,
            max_output_tokens=self._mode.max_tokens,
            frame_s=self._mode.frame_s,
        )
        words: list[str] = []
        done: TurnDone | None = None
        async with aclosing(self._session.respond(asked)) as events:
            async for event in events:
                if isinstance(event, TranscriptDelta):
                    words.append(event.text)
                elif isinstance(event, TurnDone):
                    done = event
        if done is None:
            raise StageFailedError("The frame ended without a result.")
        return done, "".join(words)

    def _report(self, frame: _Frame, outcome: str, **facts) -> None:
        self._metrics.frames.labels(outcome).inc()
        self._emit(
            "frame.done",
            frame_index=frame.index,
            audio_start_ms=frame.start // _SAMPLES_PER_MS,
            audio_end_ms=frame.end // _SAMPLES_PER_MS,
            missing_before=frame.n_missing,
            outcome=outcome,
            **{"text": "", "output_tokens": 0, "latency_ms": None, "error": None, **facts},
        )
