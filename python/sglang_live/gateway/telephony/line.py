"""A phone call as the sound of a session: what a process of calls is to a call over WebRTC.

In: facts of a service's dialect, audio of responses. Out: the user's sound; frames for the
service; what was heard, by its marks.
Owner: one PhoneLine per call. Little speech waits at the service: the rest can be held here.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import orjson

from sglang_live.aio import Timer
from sglang_live.clock import Clock
from sglang_live.errors import CapacityError
from sglang_live.gateway.audio.codec import WireDecoder, WireEncoder, WireFormat
from sglang_live.gateway.call.outbox import Emit
from sglang_live.gateway.telephony.dialects import (
    Begun,
    Dialect,
    Fact,
    Frame,
    HungUp,
    Key,
    Played,
    Sound,
)
from sglang_live.webrtc.messages import (
    SENT_RATE_HZ,
    Discard,
    Ended,
    Event,
    FromGateway,
    FromProcess,
    Heard,
    Hold,
    Left,
    Opened,
    Play,
    PlayedOut,
)

_MARK_MS, _PIECE_MS = 200, 20
# Facts that the session has not taken: the user's sound comes faster than time passes.
_MOST_UNREAD = 1500
# After the last key: a number has several.
_KEYS_S = 2.0
_LAST_KEY = "#"
_MOST_KEYS = 64


class TooFastError(CapacityError):
    code = "audio_too_fast"


@dataclass(slots=True, eq=False)
class _Lane:
    """
    raw: speech in the call's format that was not sent.
    n_given, n_left: bytes of PCM that came, and of which it is known that they were heard or sent.
    """

    name: str
    encoder: WireEncoder
    raw: bytearray = field(default_factory=bytearray)
    n_given: int = 0
    n_sent: int = 0
    held: bool = False
    ends: bool = False


class PhoneLine:
    """A MediaLine (gateway/webrtc/processes.py).

    opened: its session has; facts are not taken before.
    """

    def __init__(
        self,
        begun: Begun,
        dialect: Dialect,
        send: Callable[[Frame], Awaitable[None]],
        clock: Clock,
        *,
        keys_as_text: bool,
    ):
        """
        Args:
            send: sends a frame to the service.
            keys_as_text: the model is told of keys.
        """
        self.id = begun.call_id
        self.opened = asyncio.Event()
        self.on_left: Callable[[Left], None] = lambda left: None
        self._emit: Emit | None = None
        self.received: asyncio.Queue[FromProcess] = asyncio.Queue()
        self._form: WireFormat = begun.form
        self._dialect = dialect
        self._send = send
        self._clock = clock
        self._decoder = WireDecoder(begun.form)
        self._lanes: deque[_Lane] = deque()
        self._marks: dict[str, tuple[str, int]] = {}  # lane and bytes of PCM before each
        self._n_marks = 0
        self._clears = False
        self._is_over = False
        self._dry_at_s = 0.0  # when the service has played all that it got
        self._more = asyncio.Event()
        self._keys = ""
        self._keys_as_text = keys_as_text
        self._keys_end = Timer(clock, self._tell_keys, "keys of a phone")
        self.received.put_nowait(Opened(self.id, 0))

    # --- for the session ---

    def open(self, emit: Emit) -> None:
        """emit: of its events."""
        self._emit = emit
        self.opened.set()

    def tell(self, message: FromGateway) -> None:
        match message:
            case Play():
                lane = self._lane(message.lane)
                lane.n_given += len(message.pcm)
                for frame in lane.encoder.push(message.pcm):
                    lane.raw += frame
            case PlayedOut():
                lane = self._lane(message.lane)
                lane.ends = True
                for frame in lane.encoder.finish():
                    lane.raw += frame
            case Hold():
                lane = self._lane(message.lane)
                lane.held = message.held
                if not (lane.held or lane.raw or lane.ends):
                    self._lanes.remove(lane)
            case Discard():
                self._discard(message.lane)
        self._more.set()

    async def flushed(self) -> None:
        """There are no events on a phone."""

    def hang_up(self) -> None:
        self._is_over = True
        self._more.set()

    # --- for the service ---

    def take(self, fact: Fact) -> None:
        """Raises TooFastError."""
        match fact:
            case Sound():
                if self.received.qsize() > _MOST_UNREAD:
                    raise TooFastError("The call's audio comes too fast.")
                pcm = self._decoder.push(fact.raw).astype("<i2", copy=False).tobytes()
                self.received.put_nowait(Heard(self.id, pcm))
            case Played():
                self._played(fact.mark)
            case Key():
                self._pressed(fact.digit)
            case HungUp():
                self.lost("the user has hung up")

    def lost(self, reason: str) -> None:
        self.received.put_nowait(Ended(self.id, reason))
        self.hang_up()

    async def speak(self) -> None:
        """Send speech at the pace of time, until the call is over."""
        while not self._is_over:
            if self._clears:
                self._clears = False
                if (frame := self._dialect.clear()) is not None:
                    await self._send(frame)
            lane = self._next_lane()
            if lane is None:
                self._more.clear()
                await self._more.wait()
                continue
            early_s = self._dry_at_s - self._clock.now_s() - self._dialect.lead_s
            if early_s > 0:
                self._more.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(early_s):
                        await self._more.wait()
                continue
            await self._say(lane)
        self._keys_end.disarm()
        if (frame := self._dialect.hang_up()) is not None:
            await self._send(frame)

    def _next_lane(self) -> _Lane | None:
        while self._lanes and self._lanes[0].ends and not self._lanes[0].raw:
            self._lanes.popleft()
        if not self._lanes or self._lanes[0].held:
            return None
        lane = self._lanes[0]
        # A short piece is the end of its response.
        enough = lane.ends or len(lane.raw) >= self._form.n_bytes(_PIECE_MS)
        return lane if enough and lane.raw else None

    async def _say(self, lane: _Lane) -> None:
        name = str(self._n_marks + 1)
        mark = self._dialect.mark(name)
        most = self._form.n_bytes(_PIECE_MS if mark is None else _MARK_MS)
        whole = len(lane.raw) - len(lane.raw) % self._form.n_bytes(_PIECE_MS)
        n = len(lane.raw) if lane.ends and len(lane.raw) <= most else min(most, whole)
        raw = bytes(lane.raw[:n])
        del lane.raw[:n]
        now_s, duration_s = self._clock.now_s(), self._form.duration_ms(n) / 1000
        self._dry_at_s = max(self._dry_at_s, now_s) + duration_s
        n_pcm = min(2 * round(duration_s * SENT_RATE_HZ), lane.n_given - lane.n_sent)
        if lane.ends and not lane.raw:
            n_pcm = lane.n_given - lane.n_sent
        lane.n_sent += n_pcm
        if mark is None:
            await self._send(self._dialect.speech(raw))
            self.on_left(Left(self.id, lane.name, n_pcm))
            return
        self._n_marks += 1
        self._marks[name] = (lane.name, n_pcm)
        await self._send(self._dialect.speech(raw))
        await self._send(mark)

    def _played(self, mark: str) -> None:
        """Marks come in order; one that was lost is behind a later one."""
        if mark not in self._marks:
            return  # its response was discarded
        for name in list(self._marks):
            self.on_left(Left(self.id, *self._marks.pop(name)))
            if name == mark:
                return

    def _discard(self, name: str) -> None:
        self._lanes = deque(lane for lane in self._lanes if lane.name != name)
        waits = {mark for mark, (lane, _) in self._marks.items() if lane == name}
        if waits:
            self._marks = {m: left for m, left in self._marks.items() if m not in waits}
            self._clears = True
            self._dry_at_s = 0.0

    def _lane(self, name: str) -> _Lane:
        for lane in self._lanes:
            if lane.name == name:
                return lane
        self._lanes.append(_Lane(name, WireEncoder(self._form)))
        return self._lanes[-1]

    # --- keys ---

    def _pressed(self, digit: str) -> None:
        assert self._emit is not None
        kind = "input_audio_buffer.dtmf_event_received"
        self._emit(kind, numbered=False, event=digit, received_at=int(time.time()))
        if not self._keys_as_text:
            return
        if digit != _LAST_KEY:
            self._keys += digit
            self._keys_end.arm(_KEYS_S)
        if self._keys and (digit == _LAST_KEY or len(self._keys) == _MOST_KEYS):
            self._tell_keys()

    def _tell_keys(self) -> None:
        """As events of a client: the agent is silent, hears of the keys, and responds."""
        self._keys_end.disarm()
        text = f"The user has pressed these keys: {' '.join(self._keys)}"
        self._keys = ""
        content = [{"type": "input_text", "text": text}]
        item = {"type": "message", "role": "user", "content": content}
        for event in (
            {"type": "output_audio_buffer.clear"},
            {"type": "conversation.item.create", "item": item},
            {"type": "response.create"},
        ):
            self.received.put_nowait(Event(self.id, orjson.dumps(event).decode()))
