"""Serves both servers as launch_server serves the gateway, on a free port."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse

from sglang_live.client import clip
from sglang_live.clock import MonotonicClock
from sglang_live.gateway.http.body import MAX_FRAME_BYTES

# Both servers send real speech: compression on the socket depends on what is sent.
_SPEECH = Path(__file__).parents[1] / "workloads" / "clips" / "librivox_0870.flac"


def speech(n_bytes: int) -> bytes:
    """n_bytes of 24 kHz PCM16 speech, repeated as often as needed."""
    pcm = clip.load_pcm(_SPEECH)
    return (pcm * (n_bytes // len(pcm) + 1))[:n_bytes]


class LoopLag:
    """Lag of the event loop: delay of a timer beyond its due time."""

    PERIOD_S = 0.010

    def __init__(self):
        self._lags_s: list[float] = []

    async def show(self, _request: Request) -> JSONResponse:
        """P50, P99 and maximum since the last request, in ms."""
        lags_s, self._lags_s = self._lags_s or [0.0], []
        figures = [*np.percentile(lags_s, (50, 99)), max(lags_s)]
        return JSONResponse([round(1e3 * float(lag_s), 2) for lag_s in figures])

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        clock = MonotonicClock()  # the loop's own clock may be cached during an iteration
        while True:
            due_s = clock.now_s() + self.PERIOD_S
            await clock.sleep(self.PERIOD_S)
            self._lags_s.append(clock.now_s() - due_s)


def serve(app: Starlette) -> None:
    """Serve until SIGTERM; the first line on stdout is the port. GET /lag is the loop's lag."""
    lag = LoopLag()
    app.add_route("/lag", lag.show)
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        log_level="warning",
        ws_max_size=MAX_FRAME_BYTES,
        ws_per_message_deflate=False,
    )

    async def run() -> None:
        gc.collect()
        gc.freeze()
        async with lag.watched():
            await _Server(config).serve()

    uvloop.run(run())


class _Server(uvicorn.Server):
    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)
