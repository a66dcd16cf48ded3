"""A network that can lose all of its connections: neither end gets a close frame."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Cutter:
    """
    n_lines: connections so far.
    is_down: whether none can be made.
    flows: while it is clear, nothing passes either way, and no end is told of it.
    """

    def __init__(self, address: str):
        self.go_to(address)
        self._ends: list[asyncio.StreamWriter] = []
        self.n_lines = 0
        self.is_down = False
        self.flows = asyncio.Event()
        self.flows.set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Yields host:port."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        try:
            yield f"{host}:{port}"
        finally:
            server.close()
            self.cut()

    def go_to(self, address: str) -> None:
        """With later connections."""
        self._host, port = address.rsplit(":", 1)
        self._port = int(port)

    def cut(self) -> None:
        """What is on its way is lost."""
        for end in self._ends:
            end.transport.abort()
        self._ends.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.flows.wait()
        if self.is_down:
            return writer.transport.abort()
        self.n_lines += 1
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        self._ends += [writer, far_writer]
        ways = (
            pass_on(reader, far_writer, self.flows),
            pass_on(far_reader, writer, self.flows),
        )
        await asyncio.gather(*ways)


async def pass_on(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    flows: asyncio.Event | None = None,
) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            if flows is not None:
                await flows.wait()
            writer.write(data)
            await writer.drain()
        if flows is not None:
            await flows.wait()
        writer.close()
