"""An ASGI application on a real loopback socket, in the test's own event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

from sglang_live.gateway.http.body import MAX_FRAME_BYTES


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        self.ready.set()


@asynccontextmanager
async def listening(
    app: ASGIApp, protect: Callable[[uvicorn.Config], None] = lambda config: None
) -> AsyncIterator[str]:
    """Yields host:port. protect: applied to the server's settings before it starts."""
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        log_level="error",
        ws_max_size=MAX_FRAME_BYTES,
        timeout_graceful_shutdown=1,
    )
    protect(config)
    server = _Server(config)
    serving = asyncio.create_task(server.serve())
    await server.ready.wait()
    host, port = server.servers[0].sockets[0].getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        server.should_exit = True
        await serving
