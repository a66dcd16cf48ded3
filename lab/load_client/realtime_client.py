"""One /v1/realtime session, from the user's side.

    async with RealtimeClient(LoadOptions(url=...), clock) as client:
        record = await client.speak(pcm)
        await client.wait_until_played()

Every wait has a limit: connecting, the start of the session, and each turn.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from lab.load_client.microphone import Microphone
from lab.load_client.options import LoadOptions
from lab.load_client.player import PLAYBACK_EVENT, Player
from lab.load_client.response import Response
from lab.load_client.turn_tracker import Event, TurnTracker
from lab.load_client.utterance import Utterance, append_message
from sglang_live.client import clip
from sglang_live.client.connection import CONNECT_TIMEOUT_S, SessionError, open_socket
from sglang_live.clock import Clock
from sglang_live.extensions.planner.simulation.turn_record import (
    BARGE_IN,
    FALSE_TRIGGER,
    TurnRecord,
)

# Period of the check whether a turn is over without a further event.
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Interruption:
    """A planned interruption of a response.

    Attributes:
        after_s: time from the first packet of the response.
        sound: sound in the microphone at that time. None: take_turn returns then, and the next turn
            interrupts.
    """

    after_s: float
    sound: Utterance | None = None


class RealtimeClient:
    """A session with a simulated user.

    on_event: called with each event of the server.
    side_errors: codes of errors about truncations and acks.
    """

    def __init__(
        self,
        options: LoadOptions,
        clock: Clock,
        on_event: Callable[[Event], None] | None = None,
    ):
        self._options = options
        self._clock = clock
        self._on_event = on_event
        self._microphone = Microphone(clock, self._send_text, options.frames_per_message)
        self._player = Player(clock, self._post, options.truncate)
        self._socket: ClientConnection | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._session: Event | None = None
        self._updated = False
        self._tracker: TurnTracker | None = None
        # The turn whose response the current turn interrupts.
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

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    @property
    def session(self) -> Event:
        """The session object of the server; empty before session.created."""
        return self._session or {}

    @property
    def frames_sent_late(self) -> tuple[int, int]:
        """Audio frames sent, and how many of them more than 50 ms behind real time."""
        return self._microphone.frames_sent, self._microphone.frames_late

    async def speak(self, pcm: bytes) -> TurnRecord:
        """Speak a clip at real-time pace and wait for the end of the response."""
        utterance = Utterance.of(pcm, self._options.frames_per_message)
        return (await self.take_turn(utterance)).record()

    async def take_turn(
        self, utterance: Utterance, interruption: Interruption | None = None
    ) -> TurnTracker:
        """Like `speak`, with an interruption of the response if one is given.

        A returned turn that is `barged` is not over: take the next turn at once; with that one, the
        record of this one is complete.
        """
        tracker = TurnTracker(self._clock, "speech", utterance.duration_s)
        limit_s = utterance.duration_s + self._options.turn_timeout_s
        user = self._say_and_commit if self._options.push_to_talk else self._say
        await self._take_turn(tracker, limit_s, user(utterance), interruption)
        return tracker

    async def feed_microphone(self, pcm: bytes) -> None:
        """Send a clip at real-time pace without waiting for a response."""
        parts = clip.frames(pcm, self._options.frames_per_message)
        messages = [append_message(part) for part in parts]
        self._microphone.queue(messages, {})
        await self._clock.sleep(clip.duration_s(pcm))

    async def limit_responses(self, max_output_tokens: int) -> None:
        """Limit the tokens of responses, from the next one on."""
        session = {"type": "realtime", "max_output_tokens": max_output_tokens}
        await self._send({"type": "session.update", "session": session})

    async def post(self, item: str, max_output_tokens: int) -> TurnRecord:
        """Send a conversation.item.create message and request a short written response."""
        tracker = TurnTracker(self._clock, "posted")
        response = {"output_modalities": ["text"], "max_output_tokens": max_output_tokens}
        user = self._send_item(item, {"type": "response.create", "response": response})
        await self._take_turn(tracker, self._options.turn_timeout_s, user)
        return tracker.record()

    async def ask(self, text: str) -> TurnRecord:
        """Ask in writing; TTFP counts from the time at which the question is sent."""
        tracker = TurnTracker(self._clock, "text")
        content = [{"type": "input_text", "text": text}]
        item = {"type": "message", "role": "user", "content": content}
        create = json.dumps({"type": "conversation.item.create", "item": item})
        user = self._send_item(create, {"type": "response.create"})
        await self._take_turn(tracker, self._options.turn_timeout_s, user)
        return tracker.record()

    async def wait_until_played(self) -> None:
        """Wait, microphone open, until the user has heard all responses of the last turn."""
        for response in [] if self._tracker is None else self._tracker.responses:
            await response.playback.wait_until_played()

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
        self._tasks.append(asyncio.create_task(self._read(self._socket)))
        await self._send(options.session_update())
        await self._wait_until_ready()
        if not options.push_to_talk:
            self._tasks.append(asyncio.create_task(self._keep_microphone_open()))
        if options.acks:
            acks = self._player.keep_acking(self._responses)
            self._tasks.append(asyncio.create_task(acks))

    async def _wait_until_ready(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                while self._session is None or not self._updated:
                    if reason := self._session_error or self._closed_reason:
                        raise SessionError(f"the server did not open a session: {reason}")
                    await self._wait_for_change()
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
        interruption: Interruption | None = None,
    ) -> None:
        previous = self._tracker
        self._interrupted = previous if previous is not None and previous.barged else None
        self._tracker = tracker
        if self._closed_reason:
            tracker.fail("closed", self._closed_reason)
        try:
            # Real time, also with a simulated clock: a server may hang.
            async with asyncio.timeout(limit_s):
                await user
                if interruption is not None:
                    await self._interrupt_at(tracker, interruption)
                while not tracker.barged and not tracker.is_over():
                    await self._wait_for_change()
        except TimeoutError:
            tracker.fail("timeout", f"no end of the response within {limit_s:.1f} s")
        except ConnectionClosed as error:
            tracker.fail("closed", str(error))
        finally:
            self._microphone.drop_speech()

    async def _interrupt_at(self, tracker: TurnTracker, interruption: Interruption) -> None:
        """Wait for the planned time, and interrupt if the response plays then."""
        while not tracker.failed and not (tracker.is_over() and not self._is_playing(tracker)):
            left_s = tracker.until_interruption_s(interruption.after_s)
            if left_s is None:
                await self._wait_for_change()
            elif left_s > 0:
                # In short steps, because the response may end, fail or be replaced meanwhile.
                await self._clock.sleep(min(left_s, POLL_S))
            else:
                if self._is_playing(tracker):
                    self._interrupt(tracker, interruption.sound)
                return

    def _interrupt(self, tracker: TurnTracker, sound: Utterance | None) -> None:
        if sound is None:
            tracker.interrupted(BARGE_IN)
            return
        tracker.interrupted(FALSE_TRIGGER)
        self._microphone.drop_speech()
        self._microphone.queue(sound.messages, {sound.onset: tracker.interruption_began})

    @staticmethod
    def _is_playing(tracker: TurnTracker) -> bool:
        return tracker.response is not None and tracker.response.playing

    def _responses(self) -> list[Response]:
        known = (self._interrupted, self._tracker)
        return [
            response for tracker in known if tracker is not None for response in tracker.responses
        ]

    async def _say(self, utterance: Utterance) -> None:
        self._microphone.queue(utterance.messages, self._marks(utterance))

    async def _say_and_commit(self, utterance: Utterance) -> None:
        # Push-to-talk ends with the speech.
        self._microphone.queue(utterance.messages[: utterance.end], self._marks(utterance))
        await self._microphone.send_queued()
        await self._send({"type": "input_audio_buffer.commit"})
        await self._send({"type": "response.create"})

    def _marks(self, utterance: Utterance) -> dict[int, Callable[[], None]]:
        tracker = self._tracker
        interrupted = self._interrupted

        def on_end() -> None:
            if utterance.onset == utterance.end:
                on_onset()
            if tracker is not None:
                tracker.user_finished()

        def on_onset() -> None:
            if interrupted is not None:
                interrupted.interruption_began()

        return {utterance.onset: on_onset, utterance.end: on_end}

    async def _send_item(self, item: str, create: Event) -> None:
        await self._send_text(item)
        await self._send(create)
        if self._tracker is not None:
            self._tracker.user_finished()

    async def _keep_microphone_open(self) -> None:
        try:
            await self._microphone.stay_open()
        except ConnectionClosed as error:
            self._on_closed(str(error))

    async def _read(self, socket: ClientConnection) -> None:
        try:
            async for text in socket:
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
                self._session = event["session"]
                self._updated = True
            elif kind == "error" and self._tracker is None:
                self._session_error = event["error"]["message"]
            elif kind == "error" and _is_about_playback(event["error"]):
                self.side_errors.append(str(event["error"].get("code")))
                return
            for tracker in (self._interrupted, self._tracker):
                if tracker is not None:
                    tracker.on_event(event)
            if kind == "input_audio_buffer.speech_started":
                self._player.on_speech_started(self._responses())
        except (ValueError, KeyError, TypeError) as error:
            # A fault of the server must fail the turn, not end this task silently.
            self._session_error = f"malformed event {text[:200]!r}: {error!r}"
            if self._tracker is not None:
                self._tracker.fail("error", self._session_error)
        else:
            if self._on_event is not None:
                self._on_event(event)
        self._changed.set()

    def _on_closed(self, reason: str) -> None:
        self._closed_reason = self._closed_reason or reason
        if self._tracker is not None and not self._tracker.is_over():
            self._tracker.fail("closed", reason)
        self._changed.set()

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(POLL_S):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _post(self, event: Event) -> None:
        """Send without waiting, for functions that are not async."""
        task = asyncio.create_task(self._send_if_open(event))
        self._posts.add(task)
        task.add_done_callback(self._posts.discard)

    async def _send_if_open(self, event: Event) -> None:
        with contextlib.suppress(ConnectionClosed):
            await self._send(event)

    async def _send(self, event: Event) -> None:
        await self._send_text(json.dumps(event))

    async def _send_text(self, text: str) -> None:
        assert self._socket is not None, "the session is not open"
        await self._socket.send(text)


def _is_about_playback(error: Event) -> bool:
    return str(error.get("event_id")).startswith(PLAYBACK_EVENT)
