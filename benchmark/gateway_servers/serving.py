"""How both servers are served: as launch_server serves the gateway, on a port of the OS."""

import asyncio
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from sglang_live.client import clip
from sglang_live.gateway.config import MAX_FRAME_BYTES

# Both servers send real speech: compression on the socket depends on what is sent.
_SPEECH = Path(__file__).parents[1] / "workloads" / "clips" / "librivox_0870.flac"


def speech(n_bytes: int) -> bytes:
    """n_bytes of 24 kHz PCM16 speech, repeated as often as needed."""
    pcm = clip.load_pcm(_SPEECH)
    return (pcm * (n_bytes // len(pcm) + 1))[:n_bytes]


def serve(app: ASGIApp) -> None:
    """Serve until SIGTERM; the first line on stdout is the port."""
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_level="warning", ws_max_size=MAX_FRAME_BYTES
    )
    asyncio.run(_Server(config).serve())


class _Server(uvicorn.Server):
    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)
