"""Frame mode of a model that hears while it speaks: a call without turns, from its first sound on.

In: the user's audio as it comes. Out: audio and text of the model, frame by frame, and a report for
each frame.
Owner: one DuplexMode per connection, with a task from the user's first audio on. What the model
says is out of the conversation: in responses of ROLL_S each, so that none grows for hours.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from sglang_live.aio import background
from sglang_live.core import AudioDelta, HistoryItem, TextPart, TurnDone, Usage
from sglang_live.errors import LiveError
from sglang_live.gateway.call.ports import CallPort, FrameReport
from sglang_live.gateway.call.responses.plan import ResponsePlan
from sglang_live.gateway.call.responses.turn_runner import TurnRunner
from sglang_live.gateway.call.responses.writer import ResponseWriter
from sglang_live.gateway.call.settings import SessionConfig
from sglang_live.gateway.call.turns.call_frames import ROLL_S, WHY, CallFrames
from sglang_live.gateway.errors import ClientEventError, internal_error
from sglang_live.gateway.parts import GatewayParts
from sglang_live.ids import new_id
from sglang_live.orchestrator.duplex import DuplexCall, SpokenFrame

log = logging.getLogger(__name__)

# What is settled when the model begins to listen.
_OF_CALL = ("voice", "instructions", "temperature", "output_format")
_REFUSED = {
    "output_modalities": f"{WHY}: its output is audio.",
    "tools": f"{WHY}: it calls no functions.",
    "tool_choice": f"{WHY}: it calls no functions.",
    "max_output_tokens": f"{WHY}, without an end.",
    "transcription": f"{WHY}, without words for what it hears.",
}


@dataclass(eq=False)
class DuplexMode:
    """admit: see FrameMode."""

    parts: GatewayParts
    turn_runner: TurnRunner
    port: CallPort
    admit: Callable[[], object]
    on: bool = True  # the model has no other mode
    _config: SessionConfig = field(init=False)
    _call: DuplexCall | None = None
    _task: asyncio.Task[None] | None = None
    _writer: ResponseWriter | None = None
    _n_reported: int = 0  # frames

    def __post_init__(self) -> None:
        self._session = self.turn_runner.session
        self._frames = CallFrames(self._session, self.parts)

    def check(self, config: SessionConfig) -> None:
        """
        Raises:
            ClientEventError: the model cannot do it, or the call runs already with other settings.
        """
        for name, why in _REFUSED.items():
            if getattr(config, name) != getattr(self._config, name):
                raise ClientEventError(why, code="frame_mode", param=f"session.{name}")
        for name in _OF_CALL if self._task is not None else ():
            if getattr(config, name) != getattr(self._config, name):
                raise ClientEventError(
                    f"{name} cannot change: the model listens already.",
                    code="call_has_begun",
                    param=f"session.{name}",
                )

    def configure(self, config: SessionConfig, _now_sample: int) -> None:
        self._config = config

    def hear(self, raw: bytes) -> None:
        """Take the user's next audio, whole samples in the session's format."""
        for frame in self._frames.push(raw, self._config.input_format):
            self._hear_frame(frame)

    def _hear_frame(self, frame: bytes) -> None:
        if self._task is None:
            self.admit()
            self._call = self._frames.begin(self._config)
            self._task = background(self._run(self._call), "duplex")
        assert self._call is not None
        if not self._frames.hear(self._call, frame):
            self._report(outcome="dropped")

    def clear(self, _now_sample: int) -> None:
        """Drop the audio of the incomplete frame."""
        self._frames.clear()

    async def close(self) -> None:
        task = self._task
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self._writer is not None:
            self._writer.cancel("client_cancelled")

    # --- the model ---

    async def _run(self, call: DuplexCall) -> None:
        try:
            async with aclosing(call.run()) as frames:
                async for frame in frames:
                    self._speak(frame, call)
        except LiveError as error:
            log.warning("duplex_failed session=%s code=%s", self._session.session_id, error.code)
            self._fail(error)
        except Exception:
            log.exception("duplex_crashed session=%s", self._session.session_id)
            self._fail(internal_error())

    def _speak(self, frame: SpokenFrame, call: DuplexCall) -> None:
        if self._writer is not None and self._writer.made_audio_s >= ROLL_S:
            self._complete(self._writer)
            self._writer = None
            self.admit()
        writer = self._open_response()
        writer.add_transcript(frame.text)
        writer.add_audio(AudioDelta(frame.pcm))
        outcome, n_missing = self._frames.count(call, frame)
        latency_ms = None if frame.latency_s is None else round(1000 * frame.latency_s, 1)
        self._report(
            outcome=outcome,
            n_missing=n_missing,
            text=frame.text,
            latency_ms=latency_ms,
        )

    def _open_response(self) -> ResponseWriter:
        if self._writer is None:
            plan = ResponsePlan(
                config=self._config, decided_at_s=self.parts.clock.now_s(), in_conversation=False
            )
            conversation = self.turn_runner.changes.conversation
            self._writer = ResponseWriter(plan, conversation, self.port)
            self._writer.create()
        return self._writer

    def _complete(self, writer: ResponseWriter) -> None:
        text = writer.item.text if writer.item else ""
        item = HistoryItem(key=new_id("key"), role="assistant", parts=(TextPart(text),))
        writer.complete(TurnDone(status="completed", reason=None, item=item, usage=Usage()))

    def _fail(self, error: LiveError) -> None:
        self._open_response().fail(error)
        self._report(outcome="empty", error=error)

    def _report(self, outcome: str, n_missing: int = 0, **facts: Any) -> None:
        ms = round(1000 * self._frames.frame_s)
        index, self._n_reported = self._n_reported, self._n_reported + 1
        report = FrameReport(
            index=index,
            start_ms=index * ms,
            end_ms=(index + 1) * ms,
            n_missing=n_missing,
            outcome=outcome,
            **facts,
        )
        self.port.frame_done(report)
