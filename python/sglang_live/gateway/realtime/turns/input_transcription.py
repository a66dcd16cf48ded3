"""Transcripts of the user's speech, for clients that enabled them.

In: committed items. Out: input_audio_transcription events.
Owner: one InputTranscription per connection; one task transcribes one item at a time. It waits
while a response has not sent any audio yet: the first audio is urgent, a transcript is not.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang_live.core import AudioPart
from sglang_live.errors import LiveError
from sglang_live.gateway.errors import error_body, internal_error
from sglang_live.gateway.realtime.conversation.items import MessageItem
from sglang_live.gateway.realtime.outbox import Emit
from sglang_live.gateway.realtime.responses.speculation import Utterance
from sglang_live.gateway.transcribe import transcribe
from sglang_live.interaction.silero import SpeechModel
from sglang_live.orchestrator.session import VoiceSession
from sglang_live.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

_EVENT = "conversation.item.input_audio_transcription."
# If turns come faster than they are transcribed, the oldest ones fail.
_MAX_WAITING = 8
_WIND_DOWN_S = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Order:
    """One transcript to be made.

    heard: the audio as a recogniser has heard it for the turn; (): it has not.
    language, hint: None if the client named none.
    """

    item: MessageItem
    audio: AudioPart
    heard: tuple[AudioPart, ...]
    language: str | None
    hint: str | None


@dataclass(eq=False)
class InputTranscription:
    """
    speech_model: finds the speech; audio without any has an empty transcript.
    past_first_audio: cleared while a response has not sent any audio yet.
    admit: counts one more response; raises RateLimitError or DrainingError.
    """

    session: VoiceSession
    emit: Emit
    metrics: GatewayMetrics
    speech_model: SpeechModel
    past_first_audio: asyncio.Event
    admit: Callable[[], object]
    _waiting: deque[_Order] = field(default_factory=deque)
    _worker: asyncio.Task[None] | None = None

    def add(
        self,
        item: MessageItem,
        audio: AudioPart,
        settings: dict[str, str | None],
        utterance: Utterance = (),
    ) -> None:
        """
        Args:
            settings: of transcription, as in the session's config.
            utterance: the messages that a recogniser hears for the turn; (): one, of all the audio.
        """
        parts = [part for message in utterance for part in message.parts]
        heard = tuple(part for part in parts if isinstance(part, AudioPart))
        language, hint = settings.get("language"), settings.get("prompt")
        self._waiting.append(_Order(item, audio, heard, language, hint))
        if len(self._waiting) > _MAX_WAITING:
            oldest = self._waiting.popleft()
            self._fail(oldest, LiveError("Turns came faster than they could be transcribed."))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(), name="user transcripts")

    async def close(self) -> None:
        self._waiting.clear()
        if self._worker:
            self._worker.cancel()
            await asyncio.wait([self._worker], timeout=_WIND_DOWN_S)

    async def _work(self) -> None:
        while self._waiting:
            await self.past_first_audio.wait()
            order = self._waiting.popleft()
            try:
                await self._transcribe(order)
            except LiveError as error:
                log.warning("transcript_failed item=%s code=%s", order.item.id, error.code)
                self._fail(order, error)
            except Exception:
                log.exception("transcript_crashed item=%s", order.item.id)
                self._fail(order, internal_error())
        self._worker = None

    async def _transcribe(self, order: _Order) -> None:
        self.admit()
        deltas: list[str] = []
        output = transcribe(
            self.session,
            order.audio,
            self.speech_model,
            heard=order.heard,
            language=order.language,
            hint=order.hint,
        )
        async for delta in output:
            if isinstance(delta, str):
                deltas.append(delta)
                self._emit(order, "delta", delta=delta)
        text = "".join(deltas).strip()
        order.item.transcribed(text)
        usage = {"type": "duration", "seconds": round(order.audio.duration_s, 3)}
        self._emit(order, "completed", transcript=text, usage=usage)
        self.metrics.transcripts.labels("completed").inc()

    def _fail(self, order: _Order, error: LiveError) -> None:
        self._emit(order, "failed", error=error_body(error))
        self.metrics.transcripts.labels("failed").inc()

    def _emit(self, order: _Order, kind: str, **fields: Any) -> None:
        self.emit(_EVENT + kind, item_id=order.item.id, content_index=0, **fields)
