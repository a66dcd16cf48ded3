"""The sound of one call, on its way through the process that sends it.

In: audio of responses, what has left; or audio at the pace of time. Out: the events
output_audio_buffer.*; holds and discards.
Owner: one CallSound or one Track per call. Audio of responses is sent when it has left as packets,
20 ms at a time: what waits in the process can be held and discarded, as what waits in an outbox
can.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_live.gateway.call.outbox import Emit, Outbox
from sglang_live.gateway.webrtc.processes import MediaLine
from sglang_live.ids import new_id
from sglang_live.webrtc.messages import SENT_RATE_HZ, Discard, Hold, Left, Play, PlayedOut

_BUFFER = "output_audio_buffer."
# From a packet's departure to its sound: half a round trip of a usual network, and the listener's
# buffer, which browsers fill to 80 ms.
EARLY_S = 0.1
# Of a track: audio that waits in the process, where the pieces of another clock come unevenly.
_LEAD_S = 0.06

OnSent = Callable[[bytes], None]


@dataclass(slots=True)
class _Lane:
    """
    waiting: audio that has not left.
    is_done: its response is done.
    """

    waiting: bytearray = field(default_factory=bytearray)
    on_sent: OnSent = lambda pcm: None
    has_begun: bool = False
    is_done: bool = False


class CallSound:
    """The Lanes of a call (gateway/call/ports.py); the outbox has their events."""

    def __init__(self, call: MediaLine, outbox: Outbox, emit: Emit):
        self._call = call
        self._outbox = outbox
        self._emit = emit
        self._lanes: dict[str, _Lane] = {}

    def play(self, lane: str, pcm: bytes, on_sent: OnSent) -> None:
        """on_sent: called with each part of pcm when it has left."""
        state = self._lanes.setdefault(lane, _Lane())
        state.waiting += pcm
        state.on_sent = on_sent
        self._call.tell(Play(self._call.id, lane, pcm))

    def all_played(self, lane: str) -> None:
        """No more audio of this response will come."""
        if lane in self._lanes:
            self._call.tell(PlayedOut(self._call.id, lane))

    def response_done(self, lane: str) -> None:
        if (state := self._lanes.get(lane)) is not None:
            state.is_done = True
            self._check_stopped(lane, state)

    def left(self, message: Left) -> None:
        if (state := self._lanes.get(message.lane)) is None:
            return  # discarded while the message was on its way
        if not state.has_begun:
            state.has_begun = True
            self._emit(_BUFFER + "started", response_id=message.lane)
        pcm = bytes(state.waiting[: message.n_bytes])
        del state.waiting[: message.n_bytes]
        state.on_sent(pcm)
        self._check_stopped(message.lane, state)

    def hold(self, lane: str) -> None:
        self._outbox.hold(lane)
        # Its audio may all have left, or not have come.
        self._lanes.setdefault(lane, _Lane())
        self._call.tell(Hold(self._call.id, lane, True))

    def release(self, lane: str) -> None:
        self._outbox.release(lane)
        if (state := self._lanes.get(lane)) is not None:
            self._call.tell(Hold(self._call.id, lane, False))
            if not (state.waiting or state.has_begun):
                del self._lanes[lane]

    def discard_audio(self, lane: str) -> float:
        if (state := self._lanes.pop(lane, None)) is None:
            return 0.0
        self._call.tell(Discard(self._call.id, lane))
        if state.has_begun:
            self._emit(_BUFFER + "cleared", response_id=lane)
        return len(state.waiting) / 2 / SENT_RATE_HZ

    def _check_stopped(self, lane: str, state: _Lane) -> None:
        if state.is_done and not state.waiting:
            del self._lanes[lane]
            if state.has_begun:
                self._emit(_BUFFER + "stopped", response_id=lane)
            else:
                self._call.tell(Discard(self._call.id, lane))  # it may be held


class Track:
    """The sound of a call that speaks at the pace of time.

    EARLY_S: from the end of a piece to its sound.
    """

    EARLY_S = _LEAD_S + EARLY_S

    def __init__(self, call: MediaLine):
        self._call = call
        self._lane = ""

    def play(self, pcm: bytes) -> None:
        """pcm: the next piece, at SENT_RATE_HZ."""
        if not self._lane:
            self._lane = new_id("lane")
            pcm = bytes(2 * round(_LEAD_S * SENT_RATE_HZ)) + pcm
        self._call.tell(Play(self._call.id, self._lane, pcm))

    def pause(self) -> None:
        """Silence, of which nothing is sent."""
        if self._lane:
            self._call.tell(PlayedOut(self._call.id, self._lane))
            self._lane = ""
