"""The page's pictures in the handbook, drawn during sessions with the demo model.

PAGE_PICTURES=docs/img python -m pytest test/e2e/test_page_pictures.py
"""

import os
from pathlib import Path

import pytest

from test.e2e.browser import Visit, microphone, visit
from test.e2e.conftest import running_server
from test.e2e.scripted_page import ask, status
from test.e2e.test_page import PHONE

# That the page shows these states is shown by its other tests.
pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

_WIDE = {"width": 960, "height": 1010}
_LEAST_BYTES = 20_000
_ATTEMPTS, _LEAST_CUT_S = 5, 0.2


async def test_the_pictures_of_the_page_are_drawn(tmp_path):
    out = Path(os.environ.get("PAGE_PICTURES", tmp_path))
    sound = microphone(tmp_path / "silence.wav", "sp_librivox_0880.flac", before_s=120)
    with running_server("demo", tmp_path) as server:
        # What was cut off, as a client of the socket knows it. On a busy machine little may be.
        for _ in range(_ATTEMPTS):
            async with visit(server.http, sound, viewport=_WIDE) as client:
                await client.page.click("#talk")
                await status(client, "connected")
                cut_s = await interrupt(client)
                await client.page.screenshot(path=out / "page-interrupted.png")
            if cut_s > _LEAST_CUT_S:
                break
        assert cut_s > _LEAST_CUT_S
        look = {"color_scheme": "dark", "device_scale_factor": 2, **PHONE}
        for name, how in (("page", {"viewport": _WIDE}), ("page-phone", look)):
            async with visit(server.http, sound, calls=True, **how) as client:
                await client.page.click("#talk")
                await status(client, "connected")
                await client.page.click("#clip")
                await client.until(lambda client=client: is_in_an_answer(client), "it answers")
                await client.page.screenshot(path=out / f"{name}.png", full_page=name != "page")
                assert await client.text("#line") == "WebRTC"
                assert client.complaints == []
    for name in ("page", "page-interrupted", "page-phone"):
        assert (out / f"{name}.png").stat().st_size > _LEAST_BYTES


async def is_in_an_answer(client: Visit) -> bool:
    is_measured = await client.text("#network") != "–"
    return is_measured and await client.seconds("heard") > 1.0


async def interrupt(client: Visit) -> float:
    """Returns how many seconds of a story were dropped."""

    async def is_heard() -> bool:
        return await client.seconds("heard") > 1.0

    async def is_decided() -> bool:
        return await client.seconds("discarded") > 0 or len(await client.lines("model")) > 1

    await ask(client, "Tell me a story.")
    await client.responded(0)
    await client.until(is_heard, "the story is heard")
    await client.page.click("#clip")
    await client.until(is_decided, "the story is interrupted, or was over")
    return await client.seconds("discarded")
