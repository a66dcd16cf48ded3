"""Messages between an engine's scheduler and the mover of KV memory, over a Unix socket.

Each is one packet of msgpack, with the files of the memory that it names (SCM_RIGHTS).
Sizes are in granules (granules.py).
"""

import array
import os
import socket
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from sglang_live.extensions.elastic.granules import Run

# Those whose pools exchange memory.
STAGES = ("thinker", "talker")
# Path of the mover's socket, and the engine's stage.
ELASTIC_ENV = "SGLANG_LIVE_ELASTIC_KV"
# A packet holds some thousand runs: more than a pool has layers.
MAX_PACKET_BYTES = 1 << 18
# Linux passes no more with one message (SCM_MAX_FD).
MAX_FILES = 253


class Hello(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message of an engine.

    unit: granules by which the pool grows: one piece of every buffer.
    start: of its configuration.
    floor: what it always keeps.
    limit: what its address space can hold.
    place: of the memory. Engines exchange it only if theirs is the same.
    most_passed: what one message can pass.
    """

    stage: str
    unit: int
    start: int
    floor: int
    limit: int
    place: str
    most_passed: int


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The size with which the engine begins."""

    granules: int


class Need(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What an engine needs; see policy.py.

    size: what it has.
    needed: of running and waiting requests now.
    reserved: with the output that running requests may still write.
    idle: KV of idle sessions.
    """

    size: int
    needed: int
    reserved: int
    idle: int


class Obtainable(msgspec.Struct, frozen=True, tag=True):
    """What the engine could receive now if requests needed it."""

    granules: int


class Give(msgspec.Struct, frozen=True, tag=True):
    """Order to free the end of the pool and hand over its memory.

    granules: no more than it can pass at once.
    urgent: evict idle sessions for it, and not only what the radix tree has cached.
    """

    granules: int
    urgent: bool


class Given(msgspec.Struct, frozen=True, tag=True):
    """Answer to Give. The engine no longer maps what it hands over, and it reads as zeros.

    runs: empty: nothing could be freed.
    size: what is left.
    """

    runs: list[Run]
    size: int


class Take(msgspec.Struct, frozen=True, tag=True):
    """Order to map memory at the end of the pool."""

    runs: list[Run]


class Taken(msgspec.Struct, frozen=True, tag=True):
    """Answer to Take.

    error: why nothing was mapped; empty: everything was.
    size: what it has now.
    """

    error: str
    size: int


class PeerDied(msgspec.Struct, frozen=True, tag=True):
    """The other engine's process has ended: free what it held of this engine's memory."""


ToEngine = Welcome | Obtainable | Give | Take | PeerDied
ToMover = Hello | Need | Given | Taken
_ENCODER = msgspec.msgpack.Encoder()


@dataclass(slots=True)
class Packet:
    """A message, and the files that came with it, which its receiver owns."""

    message: ToEngine | ToMover
    files: list[int]

    def close(self) -> None:
        for file in self.files:
            with suppress(OSError):
                os.close(file)
        self.files = []


def send(link: socket.socket, message: ToEngine | ToMover, files: tuple[int, ...] = ()) -> None:
    """Raises OSError: the other end is gone, or does not read."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    link.sendmsg([_ENCODER.encode(message)], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def receive(link: socket.socket, kind: object, *, wait: bool = False) -> Packet | None:
    """The next message; None: there is none yet.

    Args:
        kind: ToEngine or ToMover.
    Raises:
        EOFError: the other end has closed.
        OSError, msgspec.MsgspecError, ValueError: it is broken, or sent something else.
    """
    flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
    try:
        data, files, got, _ = socket.recv_fds(link, MAX_PACKET_BYTES, MAX_FILES, flags)
    except BlockingIOError:
        return None
    packet = Packet(PeerDied(), list(files))
    try:
        if not data:
            raise EOFError
        if got & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ValueError("a packet was truncated")
        packet.message = msgspec.msgpack.decode(data, type=kind)
    except BaseException:
        packet.close()
        raise
    return packet
