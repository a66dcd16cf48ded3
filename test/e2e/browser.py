"""The page in Chromium, with a microphone that plays a recording once and is then silent."""

import asyncio
import shutil
import time
import wave
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from playwright.async_api import Page, async_playwright

from test.e2e.socket_client import clip_24k

_PATIENCE_S = 60.0
_NAMES = ("chromium", "chromium-browser", "google-chrome")
# Else Chromium's calls do not reach a server on the machine's loopback address.
LOOPBACK_CALLS = "--allow-loopback-in-peer-connection"
_NO_CALLS = "delete window.RTCPeerConnection;"
_FLAGS = (
    "--use-fake-ui-for-media-stream",
    "--use-fake-device-for-media-stream",
    "--autoplay-policy=no-user-gesture-required",
    # The browser must contact no other host.
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--no-first-run",
)


def microphone(path: Path, recording: str, before_s: float = 1.0) -> Path:
    """Write the microphone's sound to a file."""
    return microphone_of(path, clip_24k(recording), before_s)


def microphone_of(path: Path, pcm: np.ndarray, before_s: float) -> Path:
    """The same for any sound: [n] int16 at 24 kHz."""
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 24_000, 0, "NONE", ""))
        file.writeframes(np.zeros(round(24_000 * before_s), "<i2").tobytes())
        file.writeframes(pcm.astype("<i2").tobytes())
        file.writeframes(np.zeros(24_000, "<i2").tobytes())
    return path


@dataclass
class Visit:
    """One visit to the page.

    complaints: errors in the browser's console.
    asked: requested addresses.
    """

    page: Page
    complaints: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    async def text(self, selector: str) -> str:
        return await self.page.inner_text(selector)

    async def seconds(self, what: str) -> float:
        """Seconds heard, buffered or discarded of the last response."""
        return float((await self.text(f"#{what}")).split()[0])

    async def lines(self, who: str) -> list[str]:
        lines = self.page.locator("#transcript li", has=self.page.locator(f".who:text-is('{who}')"))
        return await lines.all_inner_texts()

    async def until(self, claim: Callable[[], Awaitable[bool]], what: str) -> None:
        deadline_s = time.monotonic() + _PATIENCE_S
        while not await claim():
            status = await self.text("#status")
            assert time.monotonic() < deadline_s, f"never: {what} ({status}, {self.complaints})"
            await asyncio.sleep(0.05)

    async def is_heard(self) -> bool:
        return await self.seconds("heard") > 0.2 and await self.seconds("buffered") > 0

    async def is_over(self) -> bool:
        """Whether the last response was played to its end, and no turn is running."""
        return await self.seconds("buffered") == 0 and await self.text("#status") == "connected"

    async def responded(self, n_before: int) -> None:
        """Wait until there is one response more than before."""

        async def has_response() -> bool:
            return len(await self.lines("model")) > n_before

        await self.until(has_response, "a response begins")

    async def interrupt(self, attempts: int = 8) -> None:
        """Send the page's recording during a response, and wait for the next one to begin.

        A response that is too short to be interrupted is replaced.
        """
        for _ in range(attempts):
            await self.until(self.is_heard, "a response is heard")
            n_responses = len(await self.lines("model"))
            await self.page.click("#clip")
            await self.responded(n_responses)
            if any("interrupted" in line for line in await self.lines("model")):
                return
        raise AssertionError("all responses were too short to be interrupted")


@asynccontextmanager
async def visit(
    url: str,
    sound: Path | None = None,
    *,
    flags: Sequence[str] = (),
    script: str = "",
    calls: bool = False,
    **context,
) -> AsyncIterator[Visit]:
    """Open the page.

    Args:
        calls: the browser has WebRTC; else sound and events use one socket.
        sound: the microphone's sound (WAV). None: there is no microphone.
        flags: further flags of Chromium.
        script: a script that runs before the page's.
        context: options of Playwright's browser context: viewport, color_scheme and so on.
    """
    chromium = next(filter(None, map(shutil.which, _NAMES)), None)
    assert chromium, f"none of {', '.join(_NAMES)} is installed: scripts/setup.sh --test does it"
    flags = [*flags, *([LOOPBACK_CALLS] if calls else [])]
    if sound:
        flags += [*_FLAGS, f"--use-file-for-fake-audio-capture={sound}%noloop"]
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=flags)
        try:
            page = await browser.new_page(**context)
            await page.add_init_script(script if calls else _NO_CALLS + script)
            found = Visit(page)
            page.on(
                "console",
                lambda said: said.type == "error" and found.complaints.append(said.text),
            )
            page.on("pageerror", lambda error: found.complaints.append(str(error)))
            page.on("request", lambda request: found.asked.append(request.url))
            page.on("websocket", lambda socket: found.asked.append(socket.url))
            await page.goto(url)
            yield found
        finally:
            await browser.close()
