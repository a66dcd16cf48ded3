"""A conversation over /v1/realtime: speaks clips or asks in writing, and plays the responses.

    async with Conversation(SessionOptions(url=...), clock) as conversation:
        turn = await conversation.speak(pcm)

Every wait has a limit: connecting, the start of the session, and each turn.
"""

import asyncio
import base64
import json
from collections import deque
from collections.abc import Callable
from typing import Any, Self

from websockets.exceptions import ConnectionClosed

from sglang_live.client import clip
from sglang_live.client.connection import CONNECT_TIMEOUT_S, SessionError, SessionOptions
from sglang_live.client.playback_clock import PlaybackClock
from sglang_live.client.resuming import ResumingSocket
from sglang_live.clock import Clock

Event = dict[str, Any]

# Period of the check whether a turn is over without a further event.
POLL_S = 0.1
# A response that began before the end of the speech counts if no other begins within this time.
SETTLE_S = 2.0
# Event id of what the client says of playback; an error about it does not fail the turn.
_PLAYBACK_EVENT = "playback"


class Turn:
    """A turn and the response to it, as the user experiences it. Does no I/O.

    kind: `speech` or `text`.
    status: the response's own (`completed`, `incomplete`, `cancelled`, `failed`), or why it has
        none: `empty`, `error`, `timeout`, `closed`.
    pcm, transcript, playback: of the latest response, which is the one that counts.
    """

    def __init__(self, clock: Clock, kind: str):
        self._clock = clock
        self.kind = kind
        self._finished_s: float | None = None
        self._stopped_s: float | None = None
        # Whether the server will respond to speech that it has heard.
        self._response_due = False
        self._begin_response(None)

    def _begin_response(self, response_id: str | None) -> None:
        self.response_id = response_id
        self.item_id: str | None = None
        self.status = ""
        self.error: str | None = None
        self.pcm = bytearray()
        self.transcript = ""
        self.playback = PlaybackClock(self._clock)
        self._created_s = self._clock.now_s()
        self._first_audio_s: float | None = None
        self._done_s: float | None = None

    @property
    def ok(self) -> bool:
        return self.status in ("completed", "incomplete")

    @property
    def ttfp_ms(self) -> float | None:
        """From the end of the user's speech to the first audio; None without audio."""
        return self._since_speech_ms(self._first_audio_s)

    @property
    def end_of_turn_ms(self) -> float | None:
        """From there to the server's speech_stopped event; None without server VAD."""
        return self._since_speech_ms(self._stopped_s)

    @property
    def audio_s(self) -> float:
        return clip.duration_s(self.pcm)

    @property
    def is_playing(self) -> bool:
        """Whether the user hears the response, or would hear its next packet."""
        if self._first_audio_s is None or self.playback.flushed:
            return False
        return self._done_s is None or self.playback.buffered_s > 0

    @property
    def is_over(self) -> bool:
        if self.error is not None:
            return True
        if self._done_s is None or self._finished_s is None:
            return False
        if self._created_s >= self._finished_s and self.status != "cancelled":
            return True
        quiet_s = self._clock.now_s() - max(self._done_s, self._finished_s)
        return quiet_s >= SETTLE_S and not self._response_due

    def user_finished(self) -> None:
        """The last of the user's speech has been sent."""
        self._finished_s = self._clock.now_s()

    def fail(self, status: str, message: str) -> None:
        self.status = status
        self.error = message

    def on_event(self, event: Event) -> None:
        match event["type"]:
            case "input_audio_buffer.speech_started":
                self._response_due = True
            case "input_audio_buffer.speech_stopped":
                self._stopped_s = self._clock.now_s()
            case "response.created":
                # A later one replaces an earlier one: the server took a pause for the end.
                self._response_due = False
                self._begin_response(event["response"]["id"])
            case "response.output_audio.delta" if event["response_id"] == self.response_id:
                self._add_audio(event)
            case "response.output_audio_transcript.delta":
                if event["response_id"] == self.response_id:
                    self.transcript += event["delta"]
            case "response.done" if event["response"]["id"] == self.response_id:
                self._end_response(event["response"])
            case "error":
                error = event["error"]
                self.fail("error", f"{error.get('code') or error['type']}: {error['message']}")

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "kind": self.kind,
            "status": self.status,
            "error": self.error,
            "ttfp_ms": self.ttfp_ms,
            "end_of_turn_ms": self.end_of_turn_ms,
            "audio_s": self.audio_s,
            "gaps_over_100ms": self.playback.audible_gaps,
            "transcript": self.transcript,
            "response_id": self.response_id,
        }
        return {k: round(v, 3) if isinstance(v, float) else v for k, v in fields.items()}

    def _add_audio(self, event: Event) -> None:
        packet = base64.b64decode(event["delta"], validate=True)
        if len(packet) % clip.BYTES_PER_SAMPLE:
            raise ValueError(f"an audio packet of {len(packet)} bytes splits a sample")
        if packet:
            self.item_id = event["item_id"]
            if self._first_audio_s is None:
                self._first_audio_s = self._clock.now_s()
            self.pcm += packet
            self.playback.packet_received(clip.duration_s(packet))

    def _end_response(self, response: Event) -> None:
        self._done_s = self._clock.now_s()
        self.status = response["status"]
        if self.status == "failed":
            details = response.get("status_details") or {}
            self.error = (details.get("error") or {}).get("message") or "failed"
        elif self.status == "completed" and not self.pcm:
            self.fail("empty", "the response completed without any audio")

    def _since_speech_ms(self, at_s: float | None) -> float | None:
        if at_s is None or self._finished_s is None:
            return None
        return (at_s - self._finished_s) * 1000


class Conversation:
    """A session, which goes on over another socket when the network loses its own.

    on_event: called with each event of the server.
    session: the server's session object.
    """

    def __init__(
        self,
        options: SessionOptions,
        clock: Clock,
        on_event: Callable[[Event], None] = lambda event: None,
    ):
        self._options = options
        self._clock = clock
        self._on_event = on_event
        # Frames of speech, each with what to call when it has been sent.
        self._speech: deque[tuple[bytes, Callable[[], None]]] = deque()
        self._playback = PlaybackClock(clock)
        self._socket = ResumingSocket(options, lambda: self._playback.heard_s)
        self._microphone: asyncio.Task[None] | None = None
        self.session: Event = {}

    async def __aenter__(self) -> Self:
        await self._socket.open()
        try:
            await self._open_session()
        except BaseException:
            await self._socket.close()
            raise
        if not self._options.push_to_talk:
            self._microphone = asyncio.create_task(self._keep_microphone_open())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self._microphone is not None:
            self._microphone.cancel()
            await asyncio.gather(self._microphone, return_exceptions=True)
        await self._socket.close()

    async def speak(self, pcm: bytes) -> Turn:
        """Speak a clip at real-time pace and wait for the end of the response.

        Raises ValueError for audio without samples.
        """
        if not (end := clip.speech_frames(pcm)):
            raise ValueError("the clip holds no samples")
        turn = Turn(self._clock, "speech")
        for n, frame in enumerate(clip.frames(pcm), start=1):
            if n <= end or not self._options.push_to_talk:
                self._speech.append((frame, turn.user_finished if n == end else _nothing))
        return await self._take(turn, clip.duration_s(pcm))

    async def ask(self, text: str) -> Turn:
        """Ask in writing; times count from the time at which the question is sent."""
        turn = Turn(self._clock, "text")
        content = [{"type": "input_text", "text": text}]
        item = {"type": "message", "role": "user", "content": content}
        return await self._take(turn, 0.0, {"type": "conversation.item.create", "item": item})

    async def wait_until_played(self) -> None:
        await self._playback.wait_until_played()

    async def _open_session(self) -> None:
        await self._send(self._options.session_update())
        kind = ""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                while kind != "session.updated":
                    event = json.loads(await self._socket.recv())
                    kind = event["type"]
                    if kind == "error":
                        reason = event["error"]["message"]
                        raise SessionError(f"the server did not open a session: {reason}")
                    self.session = event.get("session", {})
        except TimeoutError as error:
            raise SessionError(
                f"{self._options.url} accepted the connection but sent no session within "
                f"{CONNECT_TIMEOUT_S:.0f} s"
            ) from error
        except ConnectionClosed as error:
            raise SessionError(f"the server did not open a session: {error}") from error

    async def _take(self, turn: Turn, spoken_s: float, item: Event | None = None) -> Turn:
        limit_s = spoken_s + self._options.turn_timeout_s
        try:
            # Real time, also with a simulated clock: a server may hang.
            async with asyncio.timeout(limit_s):
                if item is not None:
                    await self._send(item)
                elif self._options.push_to_talk:
                    await self._send_queued()
                    await self._send({"type": "input_audio_buffer.commit"})
                if item is not None or self._options.push_to_talk:
                    await self._send({"type": "response.create"})
                if item is not None:
                    turn.user_finished()
                while not turn.is_over:
                    await self._receive(turn)
        except TimeoutError:
            turn.fail("timeout", f"no end of the response within {limit_s:.1f} s")
        except ConnectionClosed as error:
            turn.fail("closed", str(error))
        self._speech.clear()
        return turn

    async def _receive(self, turn: Turn) -> None:
        """Take an event; return without one after a while."""
        try:
            async with asyncio.timeout(POLL_S):
                text = await self._socket.recv()
        except TimeoutError:
            return
        try:
            event = json.loads(text)
            kind = event["type"]
            if kind == "error" and event["error"].get("event_id") == _PLAYBACK_EVENT:
                return
            turn.on_event(event)
            if kind == "response.output_audio.delta" and event["response_id"] == turn.response_id:
                self._playback = turn.playback
        except (ValueError, KeyError, TypeError) as error:
            turn.fail("error", f"malformed event {text[:200]!r}: {error!r}")
            return
        self._on_event(event)
        if kind == "input_audio_buffer.speech_started":
            await self._stop_playback(turn)

    async def _stop_playback(self, turn: Turn) -> None:
        """Drop audio that was not played yet, as every client of the protocol does."""
        if not turn.is_playing:
            return
        turn.playback.flush()
        await self._send(
            {
                "type": "conversation.item.truncate",
                "event_id": _PLAYBACK_EVENT,
                "item_id": turn.item_id,
                "content_index": 0,
                "audio_end_ms": int(turn.playback.heard_s * 1000),
            }
        )

    async def _keep_microphone_open(self) -> None:
        """The server's VAD finds the end of a turn by the silence after it."""
        due_s = self._clock.now_s()
        while True:
            due_s = await self._send_frame(due_s)

    async def _send_queued(self) -> None:
        """Send the speech alone: push-to-talk ends with it."""
        due_s = self._clock.now_s()
        while self._speech:
            due_s = await self._send_frame(due_s)

    async def _send_frame(self, due_s: float) -> float:
        """Send speech, or silence when there is none. Returns when the next frame is due."""
        silence = bytes(clip.FRAME_BYTES), _nothing
        frame, on_sent = self._speech.popleft() if self._speech else silence
        audio = base64.b64encode(frame).decode()
        await self._send({"type": "input_audio_buffer.append", "audio": audio})
        on_sent()
        # Due times count from the start: after a late frame the next one comes early.
        due_s += clip.FRAME_S
        await self._clock.sleep(due_s - self._clock.now_s())
        return due_s

    async def _send(self, event: Event) -> None:
        await self._socket.send(event)


def _nothing() -> None:
    """What happens when an ordinary frame has been sent."""
