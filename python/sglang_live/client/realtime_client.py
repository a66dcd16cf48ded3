"""One /v1/realtime session seen from the caller's side.

    async with RealtimeClient(SessionOptions(url=...), clock) as client:
        record = await client.speak(pcm)
        await client.wait_until_played()

Nothing here waits without a limit: connecting, the session's start and every turn have one.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Self
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from sglang_live.client import clip
from sglang_live.client.microphone import Microphone
from sglang_live.client.session_options import SessionOptions
from sglang_live.client.turn_record import TurnRecord
from sglang_live.client.turn_tracker import Event, TurnTracker
from sglang_live.clock import Clock

CONNECT_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0
# How often a turn that waits looks whether it has settled without an event.
POLL_S = 0.1


class SessionError(Exception):
    """The session could not be opened; the message says what to do about it."""


class RealtimeClient:
    def __init__(
        self,
        options: SessionOptions,
        clock: Clock,
        on_event: Callable[[Event], None] | None = None,
    ):
        self._options = options
        self._clock = clock
        self._on_event = on_event
        self._microphone = Microphone(clock, self._send_text)
        self._socket: ClientConnection | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()
        self._session: Event | None = None
        self._updated = False
        self._tracker: TurnTracker | None = None
        self._closed_reason: str | None = None
        self._session_error: str | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_exc) -> None:
        await self.close()

    @property
    def session(self) -> Event:
        """The session object the server announced."""
        return self._session or {}

    @property
    def frames_sent_late(self) -> tuple[int, int]:
        """Audio frames sent, and how many of them more than 50 ms behind real time."""
        return self._microphone.frames_sent, self._microphone.frames_late

    async def speak(self, pcm: bytes) -> TurnRecord:
        """Say a clip at real-time pace and follow the answer to its end."""
        n_speech_frames = clip.speech_frames(pcm)
        if not n_speech_frames:
            raise ValueError("the clip holds no samples")
        tracker = TurnTracker(self._clock, "speech", clip.duration_s(pcm))
        limit_s = clip.duration_s(pcm) + self._options.turn_timeout_s
        if not self._options.push_to_talk:
            return await self._take_turn(tracker, limit_s, self._say(pcm, n_speech_frames))
        # Push-to-talk: the button is let go where the speech ends.
        spoken = pcm[: n_speech_frames * clip.FRAME_BYTES]
        return await self._take_turn(tracker, limit_s, self._say_and_commit(spoken))

    async def ask(self, text: str) -> TurnRecord:
        """Ask in writing; TTFP then counts from the moment the question is sent."""
        tracker = TurnTracker(self._clock, "text")
        return await self._take_turn(tracker, self._options.turn_timeout_s, self._write(text))

    async def wait_until_played(self) -> None:
        """Wait, microphone open, until the listener has heard the last reply."""
        if self._tracker is not None and self._tracker.reply is not None:
            await self._tracker.reply.playback.wait_until_played()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._socket is not None:
            await self._socket.close()
            self._socket = None

    async def _open(self) -> None:
        options = self._options
        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        loopback = urlsplit(options.url).hostname in ("localhost", "127.0.0.1", "::1")
        try:
            self._socket = await connect(
                options.full_url(),
                additional_headers=headers,
                open_timeout=CONNECT_TIMEOUT_S,
                close_timeout=CLOSE_TIMEOUT_S,
                max_size=None,
                # A proxy for the world outside does not know this machine's loopback.
                proxy=None if loopback else True,
            )
        except InvalidStatus as error:
            raise SessionError(f"{options.url} refused: {_describe(error)}") from error
        except (OSError, WebSocketException) as error:
            raise SessionError(
                f"cannot reach {options.url}: {error or type(error).__name__}; "
                "is the server running (GET /health)?"
            ) from error
        self._tasks.append(asyncio.create_task(self._read()))
        await self._send(options.session_update())
        await self._wait_until_ready()
        if not options.push_to_talk:
            self._tasks.append(asyncio.create_task(self._keep_microphone_open()))

    async def _wait_until_ready(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                while self._session is None or not self._updated:
                    if reason := self._session_error or self._closed_reason:
                        raise SessionError(f"the server did not open a session: {reason}")
                    await self._wait_for_news()
        except TimeoutError as error:
            raise SessionError(
                f"{self._options.url} accepted the connection but sent no session within "
                f"{CONNECT_TIMEOUT_S:.0f} s"
            ) from error

    async def _take_turn(
        self, tracker: TurnTracker, limit_s: float, user: Awaitable[None]
    ) -> TurnRecord:
        self._tracker = tracker
        if self._closed_reason:
            tracker.fail("closed", self._closed_reason)
        try:
            # Wall time on purpose: this is the guard against a server that hangs.
            async with asyncio.timeout(limit_s):
                await user
                while not tracker.is_over():
                    await self._wait_for_news()
        except TimeoutError:
            tracker.fail("timeout", f"no end of the answer within {limit_s:.1f} s")
        except ConnectionClosed as error:
            tracker.fail("closed", str(error))
        finally:
            self._microphone.drop_speech()
        return tracker.record()

    async def _say(self, pcm: bytes, n_speech_frames: int) -> None:
        self._microphone.say(pcm, n_speech_frames, self._tracker.user_finished)

    async def _say_and_commit(self, pcm: bytes) -> None:
        self._microphone.say(pcm, clip.speech_frames(pcm), self._tracker.user_finished)
        await self._microphone.send_queued()
        await self._send({"type": "input_audio_buffer.commit"})
        await self._send({"type": "response.create"})

    async def _write(self, text: str) -> None:
        content = [{"type": "input_text", "text": text}]
        item = {"type": "message", "role": "user", "content": content}
        await self._send({"type": "conversation.item.create", "item": item})
        await self._send({"type": "response.create"})
        self._tracker.user_finished()

    async def _keep_microphone_open(self) -> None:
        try:
            await self._microphone.stay_open()
        except ConnectionClosed as error:
            self._on_closed(str(error))

    async def _read(self) -> None:
        try:
            async for text in self._socket:
                self._take(text)
            self._on_closed("the server closed the connection")
        except ConnectionClosed as error:
            self._on_closed(str(error))

    def _take(self, text: str | bytes) -> None:
        try:
            event = json.loads(text)
            kind = event["type"]
            if kind == "session.created":
                self._session = event["session"]
            elif kind == "session.updated":
                self._session, self._updated = event["session"], True
            elif kind == "error" and self._tracker is None:
                self._session_error = event["error"]["message"]
            if self._tracker is not None:
                self._tracker.on_event(event)
        except (ValueError, KeyError, TypeError) as error:
            # A broken server must show up as a failed turn, not end this task unseen.
            self._session_error = f"malformed event {text[:200]!r}: {error!r}"
            if self._tracker is not None:
                self._tracker.fail("error", self._session_error)
        else:
            if self._on_event is not None:
                self._on_event(event)
        self._news.set()

    def _on_closed(self, reason: str) -> None:
        self._closed_reason = self._closed_reason or reason
        if self._tracker is not None and not self._tracker.is_over():
            self._tracker.fail("closed", reason)
        self._news.set()

    async def _wait_for_news(self) -> None:
        self._news.clear()
        try:
            async with asyncio.timeout(POLL_S):
                await self._news.wait()
        except TimeoutError:
            pass

    async def _send(self, event: Event) -> None:
        await self._send_text(json.dumps(event))

    async def _send_text(self, text: str) -> None:
        await self._socket.send(text)


def _describe(error: InvalidStatus) -> str:
    response = error.response
    body = response.body.decode(errors="replace").strip()[:300] if response.body else ""
    retry = response.headers.get("Retry-After")
    hint = f"; try again in {retry} s" if retry else ""
    return f"HTTP {response.status_code} {body}{hint}".strip()
