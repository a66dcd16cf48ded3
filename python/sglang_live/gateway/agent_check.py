"""HAProxy's agent check: how much room this server has for new sessions.

HAProxy connects every few seconds and reads one line (`agent-check` of its configuration manual):
the share of the server's limit that is free becomes its weight. It sees neither keys nor content.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_live.aio import background
from sglang_live.gateway.http.health import Health
from sglang_live.gateway.listen_socket import ListenSocket
from sglang_live.gateway.parts import GatewayAddition, GatewayParts


@dataclass(eq=False, slots=True)
class AgentCheck(GatewayAddition):
    """
    socket: bound, not open yet.
    """

    socket: ListenSocket
    health: Callable[[], Health]
    parts: GatewayParts
    _serving: asyncio.Task[None] | None = field(init=False, default=None)

    def line(self) -> str:
        """`ready` takes back an earlier `drain`. A weight of 0 would be one, also of the last
        server that is up, whose own refusal tells a client when to come back.
        """
        if self.parts.drain.began.is_set():
            return "drain"
        if not self.health().serving:
            return "down # a stage does not serve"
        now = self.parts.loop_lag.limited(self.parts.orchestrator.capacity_now())
        return f"ready up {max(1, 100 * now.n_more // max(1, now.limit))}%"

    def start(self) -> None:
        self._serving = background(self._serve(), "agent check")

    async def close(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._answer, sock=self.socket.socket)
        async with server:
            await server.serve_forever()

    async def _answer(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(f"{self.line()}\n".encode())
            await writer.drain()
        except ConnectionError:
            pass  # HAProxy did not wait for the line
        finally:
            writer.close()
