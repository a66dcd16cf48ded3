"""The calls that are open, over WebRTC or from phones, of all protocols.

In: offers of clients that may open a session. Out: answers; sessions that run until their calls
end.
Owner: one OpenCalls per gateway.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from starlette.datastructures import Address

from sglang_live.aio import background, close_all
from sglang_live.errors import BadInputError, CapacityError
from sglang_live.gateway.call.link import CallLink
from sglang_live.gateway.errors import cut
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.webrtc.processes import MediaCall, MediaProcesses
from sglang_live.gateway.webrtc.wire import CallWire

log = logging.getLogger(__name__)


class NoSuchCallError(BadInputError):
    code = "call_not_found"
    http_status = 404
    param = "call_id"

    def __init__(self, call_id: str):
        super().__init__(f"There is no call {cut(call_id)!r}.")


@dataclass(frozen=True, slots=True)
class OpenCall:
    """owner: of the key that began it."""

    session_id: str
    wire: CallWire
    owner: str
    running: asyncio.Task[None]

    async def hang_up(self) -> None:
        self.wire.hang_up()
        await asyncio.wait({self.running})


@dataclass(frozen=True, slots=True)
class Begun:
    """answer: the SDP."""

    call_id: str
    session_id: str
    answer: str


class OpenCalls:
    def __init__(self, parts: GatewayParts):
        self._parts = parts
        network = parts.config.webrtc.network(is_loopback=parts.config.is_loopback)
        self._processes = MediaProcesses(network, parts.metrics.clients_dropped.labels("call_lost"))
        self._calls: dict[str, OpenCall] = {}

    def check(self, owner: str) -> None:
        """Raises LiveError if no call can begin now, whatever else its key has open."""
        parts = self._parts
        parts.tiers.check_heard(owner)
        parts.loop_lag.check()
        capacity = parts.orchestrator.capacity_now()
        if capacity.n_more < 1:
            raise CapacityError(capacity.why, retry_after_s=5.0)

    async def begin(
        self,
        sdp: str,
        client: Address | None,
        owner: str,
        counted: ExitStack,
        link_of: Callable[[MediaCall, CallWire], CallLink],
        opening: str | None = None,
    ) -> Begun:
        """Begin a call, whose session runs on.

        Args:
            client: from where the request came; None: it is not known.
            owner: of the client's key.
            counted: its session, among the open ones; taken over, and closed with the call.
            link_of: makes its link.
            opening: see CallWire.
        Raises:
            UnusableOfferError: the offer cannot be answered.
            CapacityError: no process answers.
        """
        parts = self._parts
        self._processes.check_installed()
        call, answer = await self._processes.offer(sdp, client.host if client else "")
        wire = CallWire(call, parts.metrics.events_shortened, opening)
        link = link_of(call, wire)
        self.start(call.id, wire, link, owner, counted)
        log.info("call_begun call=%s session=%s", call.id, link.session_id)
        return Begun(call.id, link.session_id, answer)

    def start(
        self, call_id: str, wire: CallWire, link: CallLink, owner: str, counted: ExitStack
    ) -> OpenCall:
        """Run a call's session until it ends.

        Args:
            counted: see begin().
        Raises:
            BadInputError: there is a call of this name.
        """
        if call_id in self._calls:
            raise BadInputError(f"There is a call {cut(call_id)!r} already.")

        counted = counted.pop_all()

        async def run() -> None:
            self._parts.drain.begin_serving()
            try:
                with counted:
                    await link.run()
            finally:
                self._parts.drain.end_serving()
                wire.hang_up()
                del self._calls[call_id]

        running = background(run(), "call")
        self._calls[call_id] = OpenCall(link.session_id, wire, owner, running)
        return self._calls[call_id]

    def find(self, call_id: str, owner: str) -> OpenCall:
        """Raises NoSuchCallError: there is none of this key."""
        found = self._calls.get(call_id)
        if found is None or found.owner != owner:
            raise NoSuchCallError(call_id)
        return found

    def of_session(self, session_id: str, owner: str) -> OpenCall | None:
        """The call of a session, also of one that has not started."""
        wanted = (session_id, owner)
        return next((c for c in self._calls.values() if (c.session_id, c.owner) == wanted), None)

    async def close(self) -> None:
        for open_call in list(self._calls.values()):
            open_call.wire.hang_up()
        if running := [one.running for one in self._calls.values()]:
            await asyncio.wait(running)
        await close_all(self._processes.close)
