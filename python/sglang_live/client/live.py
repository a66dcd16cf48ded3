"""A conversation over /v1/live/sessions, measured as one over /v1/realtime.

The protocol has no turns: a response begins with the first sound and ends with a pause. A Turn
gets events of the other protocol that say so.
"""

import asyncio
import base64
import json
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from websockets.exceptions import ConnectionClosed

from sglang_live.client import clip
from sglang_live.client.connection import (
    CONNECT_TIMEOUT_S,
    SessionError,
    SessionOptions,
    open_socket,
)
from sglang_live.client.conversation import Event, Turn
from sglang_live.clock import Clock

# Longer than the pauses that a suspected interruption or a slow server makes.
PAUSE_S = 0.8
_CLOSE_S = 5.0


class LiveConversation:
    """As Conversation."""

    def __init__(
        self,
        options: SessionOptions,
        clock: Clock,
        on_event: Callable[[Event], None] = lambda event: None,
    ):
        self._options = options
        self._clock = clock
        self._on_event = on_event
        self._speech: deque[tuple[bytes, Callable[[], None]]] = deque()
        self._microphone: asyncio.Task[None] | None = None
        self._n_responses = 0
        self._silence = bytearray()  # since the last sound of a response
        self._speaks = False
        self.session: Event = {}

    async def __aenter__(self) -> Self:
        self._socket = await open_socket(self._options)
        try:
            await self._start()
        except BaseException:
            await self._socket.close()
            raise
        self._microphone = asyncio.create_task(self._keep_microphone_open())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        assert self._microphone is not None
        self._microphone.cancel()
        await asyncio.gather(self._microphone, return_exceptions=True)
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._send({"type": "session.close"})
                while json.loads(await self._socket.recv())["type"] != "session.closed":
                    pass
        except (TimeoutError, ConnectionClosed):
            pass  # the session ends with the socket
        await self._socket.close()

    async def speak(self, pcm: bytes) -> Turn:
        """Speak a clip at real-time pace and wait for the end of the response.

        Raises ValueError for audio without samples.
        """
        if not (end := clip.speech_frames(pcm)):
            raise ValueError("the clip holds no samples")
        turn = Turn(self._clock, "speech")
        for n, frame in enumerate(clip.frames(pcm), start=1):
            self._speech.append((frame, turn.user_finished if n == end else lambda: None))
        return await self._take(turn, clip.duration_s(pcm))

    async def ask(self, text: str) -> Turn:
        """Ask the model to speak about a text; times count from the time at which it is sent."""
        turn = Turn(self._clock, "text")
        turn.user_finished()
        await self._send(
            {"type": "session.commentary.append", "content": text, "delegation_id": None}
        )
        return await self._take(turn, 0.0)

    async def wait_until_played(self) -> None:
        """Audio comes at the pace at which it is played."""

    async def _start(self) -> None:
        options = self._options
        session: dict[str, Any] = {"model": options.model or "default"}
        if options.voice is not None:
            session["audio"] = {"output": {"voice": options.voice}}
        if options.instructions is not None:
            session["instructions"] = options.instructions
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                with suppress(ConnectionClosed):  # what the server has sent says why
                    await self._send({"type": "session.start", "session": session})
                event = json.loads(await self._socket.recv())
        except (TimeoutError, ConnectionClosed) as error:
            raise SessionError(f"the server did not start a session: {error!r}") from error
        if event["type"] != "session.started":
            raise SessionError(f"the server did not start a session: {event['error']['message']}")
        self.session = event["session"]

    async def _take(self, turn: Turn, spoken_s: float) -> Turn:
        limit_s = spoken_s + self._options.turn_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while not turn.is_over:
                    self._hear(json.loads(await self._socket.recv()), turn)
        except TimeoutError:
            turn.fail("timeout", f"no end of the response within {limit_s:.1f} s")
        except ConnectionClosed as error:
            turn.fail("closed", str(error))
        self._speech.clear()
        return turn

    def _hear(self, event: Event, turn: Turn) -> None:
        match event["type"]:
            case "session.output_audio.delta":
                self._hear_audio(base64.b64decode(event["delta"]), turn)
            case "session.output_transcript.delta" if self._speaks:
                self._tell(turn, "output_audio_transcript.delta", delta=event["delta"])
            case "error":
                turn.on_event(event)
                self._on_event(event)

    def _hear_audio(self, pcm: bytes, turn: Turn) -> None:
        if any(pcm):
            if not self._speaks:
                self._speaks = True
                self._n_responses += 1
                self._tell(turn, "created", response={"id": str(self._n_responses)})
            heard = base64.b64encode(bytes(self._silence) + pcm).decode()
            self._silence.clear()
            self._tell(turn, "output_audio.delta", item_id="", delta=heard)
        elif self._speaks:
            self._silence += pcm
            if clip.duration_s(self._silence) >= PAUSE_S:
                self._speaks = False
                self._silence.clear()
                response = {"id": str(self._n_responses), "status": "completed"}
                self._tell(turn, "done", response=response)

    def _tell(self, turn: Turn, kind: str, **fields: Any) -> None:
        event = {"type": f"response.{kind}", "response_id": str(self._n_responses), **fields}
        turn.on_event(event)
        self._on_event(event)

    async def _keep_microphone_open(self) -> None:
        due_s = self._clock.now_s()
        while True:
            silence = bytes(clip.FRAME_BYTES), lambda: None
            frame, on_sent = self._speech.popleft() if self._speech else silence
            audio = base64.b64encode(frame).decode()
            await self._send({"type": "session.input_audio.append", "audio": audio})
            on_sent()
            due_s += clip.FRAME_S
            await self._clock.sleep(due_s - self._clock.now_s())

    async def _send(self, event: Event) -> None:
        await self._socket.send(json.dumps(event))
