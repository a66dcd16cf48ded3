"""The page of a gateway in the test's own process, with a script instead of a model."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.types import ASGIApp

from test.e2e.browser import Visit, visit
from test.unit.gateway.live_server import listening

CLICKS_ARE_NOT_NEEDED = "--autoplay-policy=no-user-gesture-required"
# Gives tests access to the page's sockets, microphones and audio devices.
KEEP = """
window.kept = { sockets: [], tracks: [], contexts: [] };
window.WebSocket = class extends WebSocket {
  constructor(...how) { super(...how); kept.sockets.push(this); }
};
window.AudioContext = class extends AudioContext {
  constructor(...how) { super(...how); kept.contexts.push(this); }
};
const ask = navigator.mediaDevices?.getUserMedia.bind(navigator.mediaDevices);
if (ask) navigator.mediaDevices.getUserMedia = async (wish) => {
  const stream = await ask(wish);
  kept.tracks.push(...stream.getTracks());
  return stream;
};
"""
LOSE = "kept.sockets.at(-1).close(4000)"


@asynccontextmanager
async def page_of(app: ASGIApp, sound: Path | None = None, **how) -> AsyncIterator[Visit]:
    """how: arguments of `visit`."""
    how = {"flags": (CLICKS_ARE_NOT_NEEDED,), "script": KEEP, **how}
    async with listening(app) as address, visit(f"http://{address}/", sound, **how) as client:
        yield client


def frames_of(client: Visit) -> list[dict]:
    """The events in both directions on its sockets, from now on."""
    frames: list[dict] = []

    def watch(socket) -> None:
        for way in ("framesent", "framereceived"):
            socket.on(way, lambda text: frames.append(json.loads(text)))

    client.page.on("websocket", watch)
    return frames


async def ask(client: Visit, text: str) -> None:
    await client.page.fill("#text", text)
    await client.page.press("#text", "Enter")


async def status(client: Visit, text: str) -> None:
    await client.page.wait_for_selector(f"#status:text('{text}')")


async def says(client: Visit, words: str) -> None:
    """Wait until the page shows these words of the model."""

    async def is_said() -> bool:
        return any(words in line for line in await client.lines("model"))

    await client.until(is_said, f"the model says {words!r}")
