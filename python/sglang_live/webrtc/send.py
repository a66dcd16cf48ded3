"""The agent's sound on its way to packets: a queue of responses, 20 ms of it at each tick.

In: audio of responses, holds and discards. Out: packets of Opus, and what has left of which.
Owner: one SendPath per call. Nothing is encoded in silence.
"""

from collections import deque
from dataclasses import dataclass, field

from sglang_live.webrtc.messages import PACKET_BYTES, SENT_RATE_HZ
from sglang_live.webrtc.opus import Encoder

# After the last sound, so that the listener's buffer does not stretch it into the silence.
_TAIL = 5


@dataclass(slots=True)
class _Lane:
    """ends: no more audio comes."""

    name: str
    pcm: bytearray = field(default_factory=bytearray)
    held: bool = False
    ends: bool = False


class SendPath:
    def __init__(self) -> None:
        self._encoder = Encoder(SENT_RATE_HZ)
        self._lanes: deque[_Lane] = deque()
        self._tail = 0

    def play(self, name: str, pcm: bytes) -> None:
        self._lane(name).pcm += pcm

    def played_out(self, name: str) -> None:
        self._lane(name).ends = True

    def hold(self, name: str, *, held: bool) -> None:
        lane = self._lane(name)
        lane.held = held
        if not (held or lane.pcm or lane.ends):
            self._lanes.remove(lane)  # all of it has left, or none has come: others may play

    def discard(self, name: str) -> None:
        self._lanes = deque(lane for lane in self._lanes if lane.name != name)

    def expect_loss(self, share: float) -> None:
        self._encoder.expect_loss(share)

    def tick(self) -> tuple[bytes | None, str, int]:
        """The next packet, None for silence; the response whose audio it has, and how much."""
        while self._lanes and self._lanes[0].ends and not self._lanes[0].pcm:
            self._lanes.popleft()
        lane = self._lanes[0] if self._lanes else None
        if lane is not None and not lane.held and (len(lane.pcm) >= PACKET_BYTES or lane.ends):
            pcm = bytes(lane.pcm[:PACKET_BYTES])
            del lane.pcm[:PACKET_BYTES]
            self._tail = _TAIL
            return self._encoder.encode(pcm.ljust(PACKET_BYTES, b"\0")), lane.name, len(pcm)
        if self._tail:
            self._tail -= 1
            return self._encoder.encode(bytes(PACKET_BYTES)), "", 0
        return None, "", 0

    def close(self) -> None:
        self._encoder.close()

    def _lane(self, name: str) -> _Lane:
        for lane in self._lanes:
            if lane.name == name:
                return lane
        self._lanes.append(_Lane(name))
        return self._lanes[-1]
