"""Pictures of the page during a session, for the documentation.

python -m test.e2e.page_pictures --url http://127.0.0.1:30000 --out docs/img
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

from test.e2e.browser import Visit, microphone, visit
from test.e2e.test_page import PHONE

_LEAST_VISIBLE_S = 0.2


async def draw(url: str, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        sound = microphone(Path(folder) / "said.wav", "sp_librivox_0880.flac")
        async with visit(url, sound, viewport={"width": 960, "height": 900}) as client:
            await client.page.click("#talk")
            await interrupt(client)
            await client.page.screenshot(path=out / "page-interrupted.png")
            await client.until(client.is_heard, "the interruption gets a response")
            await client.page.screenshot(path=out / "page.png")
        async with visit(url, sound, color_scheme="dark", device_scale_factor=2, **PHONE) as client:
            await client.page.tap("#talk")
            await client.until(client.is_heard, "the microphone's question gets a response")
            await client.page.screenshot(path=out / "page-phone.png", full_page=True)


async def interrupt(client: Visit, attempts: int = 8) -> None:
    """Interrupt a response before its end, and return before the next one begins."""

    async def is_visible() -> bool:
        return await client.seconds("discarded") >= _LEAST_VISIBLE_S

    for _ in range(attempts):
        await client.until(client.is_heard, "a response is heard")
        n_responses = len(await client.lines("model"))
        await client.page.click("#clip")

        async def is_decided(n_before: int = n_responses) -> bool:
            return await is_visible() or len(await client.lines("model")) > n_before

        await client.until(is_decided, "the response is interrupted, or was over")
        if await is_visible():
            return
    raise AssertionError("no response had enough of it left to be interrupted")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    asyncio.run(draw(args.url, args.out))


if __name__ == "__main__":
    main()
