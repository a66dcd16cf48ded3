"""A model that hears while it speaks as the voice of a Live session: no turns, and no end.

In: the user's audio, faster than time at most for a while. Out: the model's sound, tick by tick.
Owner: one DuplexVoice per session, with a task for its call. Frames have another length than
ticks, so what is played is some frames behind what is made. Where the model is late ticks are
silent as a whole until as much is there again; where more is made than time has passed, which
follows from that, the oldest is left out: a conversation must not lag behind for hours.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from contextlib import aclosing

from sglang_live.aio import background
from sglang_live.core import HistoryItem
from sglang_live.errors import LiveError
from sglang_live.gateway.audio.codec import WireEncoder
from sglang_live.gateway.call.settings import SessionConfig
from sglang_live.gateway.call.turns.call_frames import ROLL_S, WHY, CallFrames
from sglang_live.gateway.errors import ClientEventError, internal_error
from sglang_live.gateway.live.voice import AppendKind, Said, Spoken
from sglang_live.gateway.live.work import Item
from sglang_live.gateway.parts import GatewayParts
from sglang_live.orchestrator.duplex import DuplexCall, SpokenFrame
from sglang_live.orchestrator.sessions import VoiceSession

log = logging.getLogger(__name__)

# Sound that is there before it is played: a tick, and a frame that comes a little late.
_BEGIN_MS = 180
# Sound that is made and not played: more is late.
_MOST_MS = 480
# Frames of the user that are heard before their period; those of a client that sends faster than
# time wait here instead.
_MOST_EARLY = 1


class DuplexVoice:
    """A Voice. Nothing waits for it to be quiet, so it is never at work."""

    acknowledgement_delay_ms = 0
    at_work = False
    # Its call hears silence sooner than the session's time would bring it.
    hears_silence = False

    def __init__(
        self, session: VoiceSession, config: SessionConfig, parts: GatewayParts, owner: str
    ):
        self._session_id = session.session_id
        self._config = config
        self._parts = parts
        self._owner = owner
        self._frames = CallFrames(session, parts)
        self._call: DuplexCall | None = None
        self._task: asyncio.Task[None] | None = None
        self._begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._error: LiveError | None = None
        self._said_s = 0.0  # since the call was last counted
        self._waiting: deque[bytes] = deque()  # frames of the user
        self._encoder = WireEncoder(config.output_format)
        self._audio = bytearray()
        self._n_gone = 0  # bytes of it that were played or left out
        self._texts: deque[tuple[int, str]] = deque()  # with the bytes up to the end of each
        self._plays = False

    async def begin(self, before: Iterable[Said]) -> None:
        self._admit()
        self._call = call = self._frames.begin(self._config)
        self._frames.hear(call, self._frames.silence)
        self._task = background(self._run(call), "duplex voice")
        await self._begun

    async def hear(self, raw: bytes) -> None:
        self._waiting += self._frames.push(raw, self._config.input_format)
        self._pass_on()

    def take(self, n_bytes: int) -> Spoken:
        if self._error is not None:
            raise self._error
        assert self._call is not None
        if self._call.waits and not self._waiting:
            self._waiting.append(self._frames.silence)
        self._pass_on()
        form = self._config.output_format
        wanted = n_bytes if self._plays else max(n_bytes, form.n_bytes(_BEGIN_MS))
        self._plays = len(self._audio) >= wanted
        if not self._plays:
            silence = form.silence * (n_bytes // form.sample_bytes)
            return Spoken(silence, True, self._new_text(), _sent)
        audio = bytes(self._audio[:n_bytes])
        self._leave(n_bytes)
        return Spoken(audio, False, self._new_text(), _sent)

    async def append(self, kind: AppendKind, text: str, delegation_id: str | None) -> None:
        raise ClientEventError(
            f"{WHY}: nothing can be added to what it knows.",
            code="unsupported_event",
            param="type",
        )

    def conversation(self) -> tuple[HistoryItem, ...]:
        """None: what asks for it is refused."""
        return ()

    def transcript(self) -> tuple[Item, ...]:
        """None: what asks for it is refused."""
        return ()

    def stop_speaking(self) -> None:
        self._leave(len(self._audio))
        self._plays = False

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # --- the model ---

    async def _run(self, call: DuplexCall) -> None:
        try:
            async with aclosing(call.run()) as frames:
                async for frame in frames:
                    self._add(frame, call)
        except LiveError as error:
            log.warning("duplex_failed session=%s code=%s", self._session_id, error.code)
            self._fail(error)
        except Exception:
            log.exception("duplex_crashed session=%s", self._session_id)
            self._fail(internal_error())

    def _add(self, frame: SpokenFrame, call: DuplexCall) -> None:
        self._frames.count(call, frame)
        self._said_s += self._frames.frame_s
        if self._said_s >= ROLL_S:
            self._said_s = 0.0
            self._admit()
        for piece in self._encoder.push(frame.pcm):
            self._audio += piece
        if frame.text:
            self._texts.append((self._n_gone + len(self._audio), frame.text))
        form = self._config.output_format
        if len(self._audio) > form.n_bytes(_MOST_MS):
            self._parts.metrics.frames.labels("skipped").inc()
            self._leave(len(self._audio) - form.n_bytes(_BEGIN_MS))
        if not self._begun.done():
            self._begun.set_result(None)

    def _fail(self, error: LiveError) -> None:
        self._error = error
        if not self._begun.done():
            self._begun.set_exception(error)

    def _admit(self) -> None:
        """Count some speech as one response. Raises DrainingError or RateLimitError."""
        self._parts.drain.check()
        self._parts.rate_limits.take_now(self._owner)

    # --- sound and frames that wait ---

    def _leave(self, n_bytes: int) -> None:
        del self._audio[:n_bytes]
        self._n_gone += n_bytes

    def _new_text(self) -> str:
        """Of the sound that has gone."""
        text = ""
        while self._texts and self._texts[0][0] <= self._n_gone:
            text += self._texts.popleft()[1]
        return text

    def _pass_on(self) -> None:
        assert self._call is not None
        while self._waiting and self._call.n_early <= _MOST_EARLY:
            self._frames.hear(self._call, self._waiting.popleft())


def _sent() -> None:
    """No one is told what the network has taken."""
