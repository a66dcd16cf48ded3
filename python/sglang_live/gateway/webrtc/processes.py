"""The processes that carry calls: started when they are needed, and their calls' ends.

In: offers. Out: MediaCalls, whose messages go to and from their process.
Owner: one MediaProcesses per gateway. A process that dies ends its own calls; the next call starts
another one.
"""

import asyncio
import importlib.util
import logging
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import msgspec
from prometheus_client import Counter

from sglang_live.aio import close_all
from sglang_live.errors import CapacityError, LiveError
from sglang_live.ids import new_id
from sglang_live.telemetry.log_lines import logs_json
from sglang_live.webrtc.messages import (
    Answered,
    Ended,
    FromGateway,
    FromProcess,
    HangUp,
    Inbox,
    Left,
    Offer,
    Refused,
    packed,
)
from sglang_live.webrtc.network import Network

log = logging.getLogger(__name__)

# Characters of an offer.
MAX_SDP = 1 << 16
# What one core carries at 50 packets a second each way; more calls have another process.
_MOST_CALLS = 25
# Imports take a second of a free core.
_ANSWER_S = 20.0
_LOST = "the process of the call has ended"


class UnusableOfferError(LiveError):
    code = "invalid_sdp"
    http_status = 400
    param = "sdp"


class NoWebRtcError(LiveError):
    code = "webrtc_unavailable"
    http_status = 501


class MediaLine(Protocol):
    """What carries the sound of one call.

    received: what it says of it, in order, but for on_left: called at once with what has left,
        before the user's sound that came earlier has been heard out.
    """

    id: str
    received: asyncio.Queue[FromProcess]
    on_left: Callable[[Left], None]

    def tell(self, message: FromGateway) -> None: ...

    async def flushed(self) -> None:
        """Wait until what was told is taken."""

    def hang_up(self) -> None: ...


class MediaCall:
    """A MediaLine: a call in a process."""

    def __init__(self, call_id: str, process: "_Process"):
        self.id = call_id
        self.on_left: Callable[[Left], None] = lambda left: None
        self._process = process
        self.received: asyncio.Queue[FromProcess] = asyncio.Queue()

    def tell(self, message: FromGateway) -> None:
        self._process.tell(message)

    async def flushed(self) -> None:
        await self._process.flushed()

    def hang_up(self) -> None:
        self.tell(HangUp(self.id))
        self._process.forget(self.id)


class _Process:
    def __init__(self, lost: Counter) -> None:
        self._lost = lost
        self.calls: dict[str, MediaCall] = {}
        self.is_alive = True
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self, network: Network) -> None:
        own, other = socket.socketpair()
        with other:
            settings = msgspec.json.encode(network).decode()
            module = "sglang_live.webrtc.host"
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, str(other.fileno()), settings),
                *(("--json",) if logs_json() else ()),
                pass_fds=[other.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
            )
        reader, self._writer = await asyncio.open_unix_connection(sock=own)
        self._reading = asyncio.create_task(self._read(Inbox(reader, FromProcess)))

    def tell(self, message: FromGateway) -> None:
        if self.is_alive and self._writer is not None:
            self._writer.write(packed(message))

    async def flushed(self) -> None:
        if self.is_alive and self._writer is not None:
            await self._writer.drain()

    def forget(self, call_id: str) -> None:
        self.calls.pop(call_id, None)

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()  # it ends when nothing more can be asked of it
        if self._reading is not None:
            self._reading.cancel()
        if self._process is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(2):
                    await self._process.wait()
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()

    async def _read(self, inbox: Inbox) -> None:
        try:
            while True:
                message = await inbox.next()
                if (call := self.calls.get(message.call)) is not None:
                    if isinstance(message, Left):
                        call.on_left(message)
                    else:
                        call.received.put_nowait(message)
                if isinstance(message, Ended):
                    self.forget(message.call)
        except (EOFError, OSError) as error:
            log.error("calls_lost n=%d error=%r", len(self.calls), error)
            self._lost.inc(len(self.calls))
        finally:
            self.is_alive = False
            for call in self.calls.values():
                call.received.put_nowait(Ended(call.id, _LOST))
            self.calls.clear()


class MediaProcesses:
    """lost: counts calls that ended with their process."""

    def __init__(self, network: Network, lost: Counter, most_calls: int = _MOST_CALLS):
        self._network = network
        self._lost = lost
        self._most_calls = most_calls
        self._processes: list[_Process] = []
        self._starting = asyncio.Lock()

    @staticmethod
    def check_installed() -> None:
        """Raises NoWebRtcError."""
        if importlib.util.find_spec("aiortc") is None:
            raise NoWebRtcError(
                "This server has no WebRTC: it lacks the extra sglang-live[webrtc]. /v1/realtime "
                "serves the same over WebSocket."
            )

    async def offer(self, sdp: str, client: str) -> tuple[MediaCall, str]:
        """Begin a call.

        Args:
            client: see Offer.
        Returns:
            It, and the answer's SDP.
        Raises:
            UnusableOfferError: the offer cannot be answered.
            CapacityError: no process answers.
        """
        process = await self._with_room()
        call = MediaCall(new_id("rtc"), process)
        process.calls[call.id] = call
        call.tell(Offer(call.id, sdp, client))
        try:
            async with asyncio.timeout(_ANSWER_S):
                message: Any = await call.received.get()
        except BaseException as error:
            call.hang_up()
            if isinstance(error, TimeoutError):
                raise CapacityError("No call can be answered now.", retry_after_s=5.0) from None
            raise
        match message:
            case Answered():
                return call, message.sdp
            case Refused():
                process.forget(call.id)
                raise UnusableOfferError(message.reason)
        raise CapacityError("The call could not be answered.", retry_after_s=1.0)

    async def _with_room(self) -> _Process:
        async with self._starting:
            self._processes = [one for one in self._processes if one.is_alive]
            for process in self._processes:
                if len(process.calls) < self._most_calls:
                    return process
            process = _Process(self._lost)
            await process.start(self._network)
            self._processes.append(process)
            return process

    async def close(self) -> None:
        await close_all(*(process.close for process in self._processes))
