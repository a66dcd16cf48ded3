"""Messages between the gateway and a process of calls, over a socket pair.

Each is msgpack behind four bytes of its length. `call` is the call's id.
"""

import asyncio
from typing import Any

import msgspec

_LENGTH_BYTES = 4
# The largest event of a client is far below it.
_MOST_BYTES = 64 << 20
# Audio on the way to the process, and back: little-endian int16, mono.
SENT_RATE_HZ, HEARD_RATE_HZ = 24_000, 16_000
PACKET_S = 0.02
PACKET_BYTES = 2 * SENT_RATE_HZ // 50


class _Message(msgspec.Struct, frozen=True, tag=True):
    call: str


# --- of the gateway ---


class Offer(_Message, frozen=True):
    """A call begins; answered by Answered or Refused.

    client: address from which it was asked for; "": unknown.
    """

    sdp: str
    client: str


class Event(_Message, frozen=True):
    """A text for the data channel, or from it."""

    text: str


class Play(_Message, frozen=True):
    """pcm: the next audio of a response, at SENT_RATE_HZ."""

    lane: str
    pcm: bytes


class PlayedOut(_Message, frozen=True):
    """No more audio of this response will come."""

    lane: str


class Hold(_Message, frozen=True):
    """Whether the audio of this response stays where it is."""

    lane: str
    held: bool


class Discard(_Message, frozen=True):
    """Drop the audio of this response that has not left."""

    lane: str


class HangUp(_Message, frozen=True):
    """After the events that were sent before."""


# --- of the process ---


class Answered(_Message, frozen=True):
    sdp: str


class Refused(_Message, frozen=True):
    """The offer cannot be answered."""

    reason: str


class Opened(_Message, frozen=True):
    """The data channel is open. most_bytes: of one message on it; 0: of any length."""

    most_bytes: int


class Heard(_Message, frozen=True):
    """pcm: the next audio of the user, at HEARD_RATE_HZ. Time goes on in it without a gap."""

    pcm: bytes


class Left(_Message, frozen=True):
    """n_bytes of this response's audio have left."""

    lane: str
    n_bytes: int


class Ended(_Message, frozen=True):
    """The call is over."""

    reason: str


FromGateway = Offer | Event | Play | PlayedOut | Hold | Discard | HangUp
FromProcess = Answered | Refused | Opened | Event | Heard | Left | Ended

_encoder = msgspec.msgpack.Encoder()


def packed(message: FromGateway | FromProcess) -> bytes:
    data = _encoder.encode(message)
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


class Inbox:
    """Reads messages. kinds: FromGateway or FromProcess."""

    def __init__(self, reader: asyncio.StreamReader, kinds: Any):
        self._reader = reader
        self._decoder = msgspec.msgpack.Decoder(kinds)

    async def next(self) -> Any:
        """Raises EOFError or OSError when the other side has ended."""
        length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "little")
        if length > _MOST_BYTES:
            raise EOFError(f"a message of {length} bytes")
        return self._decoder.decode(await self._reader.readexactly(length))
