"""The user's sound from packets that come late, in another order, or not at all.

In: packets of Opus as they arrive. Out: a frame of 20 ms for every 20 ms of time, from the first
packet on: what was lost is recovered from the next packet, or concealed, and time is never lost,
because a pause that is too short ends a turn too late.
Owner: one ReceivePath per call. Pure given the packets and the ticks.

The buffer is as deep as the network needs. A tick without a packet lets it grow by a frame; when
for seconds it was never nearly empty, a quiet frame is left out.
"""

from collections import deque

import numpy as np

from sglang_live.webrtc.messages import HEARD_RATE_HZ, PACKET_S
from sglang_live.webrtc.opus import Decoder, OpusError, samples_in

# Of RTP's timestamps with Opus.
RTP_RATE_HZ = 48_000
_FRAME = round(PACKET_S * HEARD_RATE_HZ)
_RTP_FRAME = round(PACKET_S * RTP_RATE_HZ)
_FRAME_BYTES = 2 * _FRAME
_SCALE = RTP_RATE_HZ // HEARD_RATE_HZ
# Frames of depth. The next packet has to be there for a lost one to be recovered from it.
_LEAST, _START, _MOST = 1, 2, 15
# A depth that the network has not needed for this long is given up, frame by frame.
_WINDOW = 200
_SPARE = 2
# RMS below which a frame is left out without being missed; a user's voice has 1000 and more.
_QUIET = 200.0
# A concealed stretch fades within 100 ms.
_MOST_CONCEALED = 5
# A jump of the timestamps beyond it is another stream, such as of a microphone that was changed.
_JUMP = 10 * RTP_RATE_HZ
_RING = 1 << 32


class ReceivePath:
    """
    Attributes:
        n_recovered, n_concealed: frames in the place of lost ones. n_late: packets that came after
            their turn. n_skipped: frames that were left out.
        n_received: packets.
    """

    def __init__(self) -> None:
        self._decoder = Decoder(HEARD_RATE_HZ)
        self._packets: dict[int, bytes] = {}  # by timestamp, without its wraps
        self._next: int | None = None  # timestamp of what is heard next; None: nothing came yet
        self._last = 0  # timestamp of the newest packet
        self._ready = bytearray()
        self._begun = False
        self._n_empty = 0  # ticks without a packet, in a row
        self._depths: deque[int] = deque(maxlen=_WINDOW)
        self.n_received = self.n_recovered = self.n_concealed = self.n_late = self.n_skipped = 0

    def push(self, timestamp: int, packet: bytes) -> None:
        """timestamp: of RTP, 32 bits."""
        try:
            samples_in(packet, RTP_RATE_HZ)
        except OpusError:
            return  # no sound: what it should have been is concealed
        self.n_received += 1
        at = self._unwrapped(timestamp)
        if self._next is None or abs(at - self._last) > _JUMP:
            self._packets.clear()
            self._next = at
        if at < self._next:
            if self._begun:
                self.n_late += 1
                return
            self._next = at
        self._last = max(self._last, at)
        self._packets[at] = packet

    def tick(self) -> bytes | None:
        """The next 20 ms; None: nothing has come yet."""
        if self._next is None:
            return None
        if not self._begun:
            if self._depth() < _START and self._n_empty < _START:
                self._n_empty += 1
                return None
            self._begun, self._n_empty = True, 0
        self._fit()
        while len(self._ready) < _FRAME_BYTES:
            self._ready += self._step()
        frame = bytes(self._ready[:_FRAME_BYTES])
        del self._ready[:_FRAME_BYTES]
        return frame

    def close(self) -> None:
        self._decoder.close()

    def _step(self) -> bytes:
        assert self._next is not None
        packet = self._packets.pop(self._next, None)
        if packet is not None:
            self._n_empty = 0
            try:
                pcm = self._decoder.decode(packet)
            except OpusError:
                pcm = self._concealed()
            self._next += len(pcm) // 2 * _SCALE
            return pcm
        if not self._packets:
            # Late or lost: that is known when another one comes.
            self._n_empty += 1
            return self._concealed()
        first = min(self._packets)
        n_empty, self._n_empty = self._n_empty, 0
        # One lost packet found the buffer empty: with a frame of delay more, the next one that is
        # lost can be recovered, as this one can.
        if n_empty and first - self._next > _RTP_FRAME:
            # That much of what is missing has been concealed.
            self._next = min(first, self._next + n_empty * _RTP_FRAME)
            return b""
        missing = min(first - self._next, _RTP_FRAME)
        self._next += missing
        if self._next < first:
            return self._concealed()
        try:
            pcm = self._decoder.recover(self._packets[first], missing // _SCALE)
            self.n_recovered += 1
        except OpusError:
            pcm = self._concealed()
        return pcm

    def _concealed(self) -> bytes:
        self.n_concealed += 1
        if self._n_empty > _MOST_CONCEALED:
            return bytes(_FRAME_BYTES)
        return self._decoder.conceal(_FRAME)

    def _fit(self) -> None:
        """Leave out what makes the buffer deeper than it has to be."""
        depth = self._depth()
        self._depths.append(depth)
        full = len(self._depths) == _WINDOW and min(self._depths) >= _LEAST + _SPARE
        while depth > _MOST or full:
            pcm = self._step()
            if not pcm:
                continue
            if depth <= _MOST and np.std(np.frombuffer(pcm, "<i2")) > _QUIET:
                self._ready += pcm  # a frame that is heard; the next one may be quiet
                return
            self.n_skipped += 1
            self._depths.clear()
            depth, full = depth - 1, False

    def _depth(self) -> int:
        """Frames from what is heard next to the newest packet."""
        assert self._next is not None
        if not self._packets:
            return 0
        return (max(self._packets) - self._next) // _RTP_FRAME + 1

    def _unwrapped(self, timestamp: int) -> int:
        """The value with these 32 bits that is nearest to the newest."""
        if self._next is None:
            return timestamp
        ahead = (timestamp - self._last) % _RING
        return self._last + (ahead if ahead < _RING // 2 else ahead - _RING)
