"""One /v1/realtime session seen from the caller's side.

    async with RealtimeClient(SessionOptions(url=...), clock) as client:
        record = await client.speak(pcm)
        await client.wait_until_played()

Nothing here waits without a limit: connecting, the session's start and every turn have one.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from sglang_live.client import clip
from sglang_live.client.connecting import CONNECT_TIMEOUT_S, SessionError, open_socket
from sglang_live.client.listener import SIDE_EVENT, Listener
from sglang_live.client.microphone import Microphone
from sglang_live.client.reply import Reply
from sglang_live.client.session_options import SessionOptions
from sglang_live.client.turn_record import BARGE_IN, FALSE_TRIGGER, TurnRecord
from sglang_live.client.turn_tracker import Event, TurnTracker
from sglang_live.client.utterance import Utterance, append_message
from sglang_live.clock import Clock

__all__ = ["Interruption", "RealtimeClient", "SessionError"]

# How often a turn that waits looks whether it has settled without an event.
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Interruption:
    """An interruption planned for a reply, `after_s` from its first packet.

    Attributes:
        sound: what the microphone picks up then; None: the turn is handed back at the cut, and
            the caller interrupts by taking the next one.
    """

    after_s: float
    sound: Utterance | None = None


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
        self._microphone = Microphone(clock, self._send_text, options.frames_per_message)
        self._listener = Listener(clock, self._post, options.truncate)
        self._socket: ClientConnection | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()
        self._session: Event | None = None
        self._updated = False
        self._tracker: TurnTracker | None = None
        # The turn whose reply the current one interrupts.
        self._interrupted: TurnTracker | None = None
        self._posts: set[asyncio.Task[None]] = set()
        self.side_errors: list[str] = []
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
        said = Utterance.of(pcm, self._options.frames_per_message)
        return (await self.take_turn(said)).record()

    async def take_turn(self, said: Utterance, cut: Interruption | None = None) -> TurnTracker:
        """Like `speak`. With a cut, the answer may be interrupted.

        A turn that comes back `barged` is not over: its record is complete when the next
        turn, to be taken at once, is.
        """
        tracker = TurnTracker(self._clock, "speech", said.duration_s)
        limit_s = said.duration_s + self._options.turn_timeout_s
        user = self._say_and_commit if self._options.push_to_talk else self._say
        await self._take_turn(tracker, limit_s, user(said), cut)
        return tracker

    async def feed_microphone(self, pcm: bytes) -> None:
        """Let the microphone hear this, at real-time pace, and wait for no answer."""
        messages = [append_message(p) for p in clip.frames(pcm, self._options.frames_per_message)]
        self._microphone.say(messages, {})
        await self._clock.sleep(clip.duration_s(pcm))

    async def limit_responses(self, max_output_tokens: int) -> None:
        """From the next answer on."""
        session = {"type": "realtime", "max_output_tokens": max_output_tokens}
        await self._send({"type": "session.update", "session": session})

    async def post(self, item: str, max_output_tokens: int) -> TurnRecord:
        """Send a conversation.item.create message and ask for a short answer in text."""
        tracker = TurnTracker(self._clock, "posted")
        asked = {"output_modalities": ["text"], "max_output_tokens": max_output_tokens}
        user = self._send_and_ask(item, {"type": "response.create", "response": asked})
        await self._take_turn(tracker, self._options.turn_timeout_s, user)
        return tracker.record()

    async def ask(self, text: str) -> TurnRecord:
        """Ask in writing; TTFP then counts from the moment the question is sent."""
        tracker = TurnTracker(self._clock, "text")
        content = [{"type": "input_text", "text": text}]
        item = {"type": "message", "role": "user", "content": content}
        create = json.dumps({"type": "conversation.item.create", "item": item})
        user = self._send_and_ask(create, {"type": "response.create"})
        await self._take_turn(tracker, self._options.turn_timeout_s, user)
        return tracker.record()

    async def wait_until_played(self) -> None:
        """Wait, microphone open, until the listener has heard all replies of the last turn."""
        for reply in [] if self._tracker is None else self._tracker.replies:
            await reply.playback.wait_until_played()

    async def close(self) -> None:
        tasks = [*self._tasks, *self._posts]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        if self._socket is not None:
            await self._socket.close()
            self._socket = None

    async def _open(self) -> None:
        options = self._options
        self._socket = await open_socket(options)
        self._tasks.append(asyncio.create_task(self._read()))
        await self._send(options.session_update())
        await self._wait_until_ready()
        if not options.push_to_talk:
            self._tasks.append(asyncio.create_task(self._keep_microphone_open()))
        if options.acks:
            acks = self._listener.keep_acking(self._replies)
            self._tasks.append(asyncio.create_task(acks))

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
        self,
        tracker: TurnTracker,
        limit_s: float,
        user: Awaitable[None],
        cut: Interruption | None = None,
    ) -> None:
        previous = self._tracker
        self._interrupted = previous if previous is not None and previous.barged else None
        self._tracker = tracker
        if self._closed_reason:
            tracker.fail("closed", self._closed_reason)
        try:
            # Wall time on purpose: this is the guard against a server that hangs.
            async with asyncio.timeout(limit_s):
                await user
                if cut is not None and await self._reach_cut(tracker, cut.after_s):
                    self._interrupt(tracker, cut.sound)
                while not tracker.barged and not tracker.is_over():
                    await self._wait_for_news()
        except TimeoutError:
            tracker.fail("timeout", f"no end of the answer within {limit_s:.1f} s")
        except ConnectionClosed as error:
            tracker.fail("closed", str(error))
        finally:
            self._microphone.drop_speech()

    async def _reach_cut(self, tracker: TurnTracker, after_s: float) -> bool:
        """Wait until the moment planned; False if the answer was played out before it."""
        while not tracker.failed and not (tracker.is_over() and not self._is_playing(tracker)):
            left_s = tracker.until_cut_s(after_s)
            if left_s is None:
                await self._wait_for_news()
            elif left_s > 0:
                # In short steps: the answer may end, fail or be replaced meanwhile.
                await self._clock.sleep(min(left_s, POLL_S))
            else:
                return self._is_playing(tracker)
        return False

    def _interrupt(self, tracker: TurnTracker, sound: Utterance | None) -> None:
        if sound is None:
            tracker.interrupted(BARGE_IN)
            return
        tracker.interrupted(FALSE_TRIGGER)
        self._microphone.drop_speech()
        self._microphone.say(sound.messages, {sound.onset: tracker.interruption_began})

    @staticmethod
    def _is_playing(tracker: TurnTracker) -> bool:
        return tracker.reply is not None and tracker.reply.playing

    def _replies(self) -> list[Reply]:
        known = (self._interrupted, self._tracker)
        return [reply for tracker in known if tracker is not None for reply in tracker.replies]

    async def _say(self, said: Utterance) -> None:
        self._microphone.say(said.messages, self._marks(said))

    async def _say_and_commit(self, said: Utterance) -> None:
        # The button is let go where the speech ends.
        self._microphone.say(said.messages[: said.end], self._marks(said))
        await self._microphone.send_queued()
        await self._send({"type": "input_audio_buffer.commit"})
        await self._send({"type": "response.create"})

    def _marks(self, said: Utterance) -> dict[int, Callable[[], None]]:
        tracker, interrupted = self._tracker, self._interrupted

        def on_end() -> None:
            if said.onset == said.end:
                on_onset()
            tracker.user_finished()

        def on_onset() -> None:
            if interrupted is not None:
                interrupted.interruption_began()

        return {said.onset: on_onset, said.end: on_end}

    async def _send_and_ask(self, item: str, ask: Event) -> None:
        await self._send_text(item)
        await self._send(ask)
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
            elif kind == "error" and _is_about_playback(event["error"]):
                self.side_errors.append(str(event["error"].get("code")))
                return
            for tracker in (self._interrupted, self._tracker):
                if tracker is not None:
                    tracker.on_event(event)
            if kind == "input_audio_buffer.speech_started":
                self._listener.on_speech_started(self._replies())
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

    def _post(self, event: Event) -> None:
        """Send without waiting, from where nothing can wait."""
        task = asyncio.create_task(self._send_if_open(event))
        self._posts.add(task)
        task.add_done_callback(self._posts.discard)

    async def _send_if_open(self, event: Event) -> None:
        with contextlib.suppress(ConnectionClosed):
            await self._send(event)

    async def _send(self, event: Event) -> None:
        await self._send_text(json.dumps(event))

    async def _send_text(self, text: str) -> None:
        await self._socket.send(text)


def _is_about_playback(error: Event) -> bool:
    return str(error.get("event_id")).startswith(SIDE_EVENT)
