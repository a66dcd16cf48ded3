"""A process of calls.

    python -m sglang_live.webrtc.host FD SETTINGS [--json]   started by gateway/webrtc/processes.py

In and out: messages over a socket pair. It ends when the gateway does.
"""

import asyncio
import logging
import signal
import socket
import sys
import time
from typing import Any

import aioice.ice
import msgspec
from aiortc import RTCIceServer

from sglang_live.telemetry.log_lines import log_in_lines
from sglang_live.webrtc.messages import (
    PACKET_S,
    Answered,
    FromGateway,
    FromProcess,
    Inbox,
    Offer,
    Refused,
    packed,
)
from sglang_live.webrtc.network import Network
from sglang_live.webrtc.peer import Peer, UnusableOfferError

log = logging.getLogger(__name__)

# A process that was stopped for longer does not make up for all of it.
_MOST_BEHIND = 3000
# Steps of the event loop until a packet in a socket has reached its call.
_STEPS_PER_PACKET = 3


class Pace:
    """When each 20 ms begin, and how many were missed. Pure given the time."""

    def __init__(self, began_s: float):
        self._began_s = began_s
        self.n = 0

    def wait_s(self, now_s: float) -> float:
        return max(0.0, self._began_s + (self.n + 1) * PACKET_S - now_s)

    def advance(self, now_s: float) -> int:
        """The next 20 ms begin. Returns how many before them were missed."""
        due = max(self.n + 1, int((now_s - self._began_s) / PACKET_S + 1e-6))
        missed, self.n = due - self.n - 1, due
        return min(missed, _MOST_BEHIND)


class Calls:
    def __init__(self, writer: asyncio.StreamWriter, network: Network):
        self._writer = writer
        self._network = network
        self._peers: dict[str, Peer] = {}
        self._answering: set[asyncio.Task[None]] = set()
        turn = network.turn
        self._turn = (
            RTCIceServer(turn.url, username=turn.username, credential=turn.password)
            if turn is not None
            else None
        )

    async def serve(self, inbox: Inbox) -> None:
        ticking = asyncio.create_task(self._tick())
        try:
            while True:
                message = await inbox.next()
                if isinstance(message, Offer):
                    task = asyncio.create_task(self._answer(message))
                    self._answering.add(task)
                    task.add_done_callback(self._answering.discard)
                elif (peer := self._peers.get(message.call)) is not None:
                    peer.take(message)
        except (EOFError, OSError):
            return
        finally:
            ticking.cancel()

    async def _answer(self, offer: Offer) -> None:
        peer = self._peers[offer.call] = Peer(offer.call, self._tell, self._turn)
        try:
            sdp = await peer.answer(offer.sdp, offer.client)
        except UnusableOfferError as error:
            del self._peers[offer.call]
            self._tell(Refused(offer.call, str(error)))
            await peer.close()
            return
        self._tell(Answered(offer.call, self._network.as_seen_from_outside(sdp)))

    def _tell(self, message: FromProcess) -> None:
        self._writer.write(packed(message))

    async def _tick(self) -> None:
        """Every 20 ms, each call hears and says 20 ms. What was missed is heard, and not said."""
        pace = Pace(time.monotonic())
        while True:
            await asyncio.sleep(pace.wait_s(time.monotonic()))
            missed = pace.advance(time.monotonic())
            for _ in range(_STEPS_PER_PACKET * missed):
                await asyncio.sleep(0)  # packets that came meanwhile are still in their sockets
            for call, peer in list(self._peers.items()):
                if peer.is_over:
                    del self._peers[call]
                else:
                    peer.tick(pace.n, missed)


async def main(descriptor: int, network: Network) -> None:
    loop = asyncio.get_running_loop()
    network.apply(loop, aioice.ice)
    connection = socket.socket(fileno=descriptor)
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    await Calls(writer, network).serve(Inbox(reader, FromGateway))


def _settings(text: str) -> Any:
    return msgspec.json.decode(text, type=Network)


if __name__ == "__main__":
    log_in_lines("webrtc", as_json="--json" in sys.argv)
    for library in ("aiortc", "aioice"):
        logging.getLogger(library).setLevel(logging.WARNING)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the server ends first
    asyncio.run(main(int(sys.argv[1]), _settings(sys.argv[2])))
