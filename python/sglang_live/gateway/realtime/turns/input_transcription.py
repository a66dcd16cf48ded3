"""The caller's words in writing, for clients that asked for them.

In: committed items, and when the answer can be heard. Out: input_audio_transcription events.
Owner: one InputTranscription per connection; one task works, on one item at a time. It lets the
answer go first: a transcript can wait, the caller does not.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_live.core import AudioPart
from sglang_live.errors import LiveError
from sglang_live.gateway.errors import error_body, internal_error
from sglang_live.gateway.realtime.conversation.items import MessageItem
from sglang_live.gateway.realtime.outbox import Emit
from sglang_live.gateway.transcribe import transcribe
from sglang_live.interaction.silero import SpeechModel
from sglang_live.orchestrator.session import VoiceSession
from sglang_live.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

_EVENT = "conversation.item.input_audio_transcription."
# A caller whose turns come faster than they are written down: the oldest are given up.
_MOST_WAITING = 8
_WIND_DOWN_S = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Wish:
    item: MessageItem
    audio: AudioPart
    language: str | None
    hint: str | None


@dataclass(eq=False)
class InputTranscription:
    """
    speech_model: what it finds no speech in has an empty transcript.
    may_work: set while no answer waits for its first sound.
    may_ask: counts one more turn of the model; raises RateLimitError.
    """

    session: VoiceSession
    emit: Emit
    metrics: GatewayMetrics
    speech_model: SpeechModel
    may_work: asyncio.Event
    may_ask: Callable[[], object]
    _waiting: deque[_Wish] = field(default_factory=deque)
    _worker: asyncio.Task[None] | None = None

    def ask(self, item: MessageItem, audio: AudioPart, wish: dict[str, str | None]) -> None:
        """wish: the session's settings of transcription."""
        self._waiting.append(_Wish(item, audio, wish.get("language"), wish.get("prompt")))
        if len(self._waiting) > _MOST_WAITING:
            given_up = self._waiting.popleft()
            self._fail(given_up, LiveError("Turns came faster than they could be written down."))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(), name="user transcripts")

    async def close(self) -> None:
        self._waiting.clear()
        if self._worker:
            self._worker.cancel()
            await asyncio.wait([self._worker], timeout=_WIND_DOWN_S)

    async def _work(self) -> None:
        while self._waiting:
            await self.may_work.wait()
            wish = self._waiting.popleft()
            try:
                await self._write_down(wish)
            except LiveError as error:
                log.warning("transcript_failed item=%s code=%s", wish.item.id, error.code)
                self._fail(wish, error)
            except Exception:
                log.exception("transcript_crashed item=%s", wish.item.id)
                self._fail(wish, internal_error())
        self._worker = None

    async def _write_down(self, wish: _Wish) -> None:
        self.may_ask()
        pieces: list[str] = []
        made = transcribe(
            self.session,
            wish.audio,
            self.speech_model,
            language=wish.language,
            hint=wish.hint,
        )
        async for piece in made:
            if isinstance(piece, str):
                pieces.append(piece)
                self._tell(wish, "delta", delta=piece)
        text = "".join(pieces).strip()
        wish.item.transcribed(text)
        usage = {"type": "duration", "seconds": round(wish.audio.duration_s, 3)}
        self._tell(wish, "completed", transcript=text, usage=usage)
        self.metrics.transcripts.labels("completed").inc()

    def _fail(self, wish: _Wish, error: LiveError) -> None:
        self._tell(wish, "failed", error=error_body(error))
        self.metrics.transcripts.labels("failed").inc()

    def _tell(self, wish: _Wish, what: str, **fields) -> None:
        self.emit(_EVENT + what, item_id=wish.item.id, content_index=0, **fields)
