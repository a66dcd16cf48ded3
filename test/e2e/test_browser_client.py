"""OpenAI's Agents SDK in Chromium, over WebRTC: the example's page, with a scripted model."""

import asyncio
import re
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from sglang_live.interaction.silero import SileroModel
from test.e2e.browser import Visit, microphone, microphone_of, visit
from test.e2e.test_examples import EXAMPLES
from test.unit.gateway.fakes import FakeOrchestrator, app_of, done, spoken
from test.unit.gateway.live_server import listening

pytestmark = [pytest.mark.e2e]

CALL = '{"name": "weather", "arguments": {"town": "Rome"}}'
PAGE = "openai_agents_browser.html"


@asynccontextmanager
async def files():
    """The examples on an origin of their own."""
    async with listening(Starlette(routes=[Mount("/", StaticFiles(directory=EXAMPLES))])) as place:
        yield f"http://{place}"


@asynccontextmanager
async def scripted(*scripts: list, sound: Path):
    """Yields the page, connected to a server of another origin; its orchestrator; its address."""
    orchestrator = FakeOrchestrator([*scripts], n_more=5)
    async with files() as origin:
        app = app_of(orchestrator, speech_model=SileroModel(), cors_origin=(origin,))
        async with listening(app) as address:
            url = f"{origin}/{PAGE}?url=http://{address}"
            async with visit(url, sound, calls=True) as client:
                await client.page.click("#talk")
                await status(client, "connected")
                yield client, orchestrator, address
                assert client.complaints == []


@pytest.fixture
def silence(tmp_path) -> Path:
    return microphone_of(tmp_path / "silence.wav", np.zeros(24_000, np.int16), before_s=0)


async def status(client: Visit, text: str) -> None:
    await client.page.wait_for_selector(f"#status:text-is('{text}')", timeout=20_000)


async def said(client: Visit, text: str) -> None:
    await client.page.wait_for_selector(f"#said li:text-is('{text}')", timeout=30_000)


async def ask(client: Visit, text: str) -> None:
    await client.page.fill("#text", text)
    await client.page.press("#text", "Enter")


async def test_the_agents_function_is_called_and_its_result_is_spoken(silence):
    scripts = [done(function_calls=(CALL,))], spoken("It rains in Rome.", 800)
    async with scripted(*scripts, sound=silence) as (client, orchestrator, _):
        await ask(client, "What is the weather in Rome?")
        await said(client, "user: What is the weather in Rome?")
        await said(client, "calls weather: It rains in Rome.")
        await said(client, "assistant: It rains in Rome.")
        assert "It rains in Rome." in orchestrator.turns[1].history[-1].parts[0].text
        assert orchestrator.turns[0].instructions == "Be brief."


async def test_speech_is_answered_and_an_interruption_cuts_the_answer(tmp_path):
    sound = microphone(tmp_path / "said.wav", "sp_librivox_0880.flac", before_s=6.0)
    async with scripted(spoken("A long story.", 20_000), sound=sound) as (
        client,
        orchestrator,
        address,
    ):
        await said(client, "assistant: A long story.")
        await asyncio.sleep(1.5)
        await client.page.click("#stop")
        async with asyncio.timeout(10):
            while not 8 < await seconds_dropped(address) < 19.5:
                await asyncio.sleep(0.1)
        await ask(client, "Stop.")
        await said(client, "assistant: All right.")
        assert len(orchestrator.turns[0].history[0].parts) == 1
        assert orchestrator.turns[0].history[0].parts[0].duration_s > 1


async def seconds_dropped(address: str) -> float:
    """Of audio, in the server."""
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"http://{address}/metrics")).text
    return float(
        re.search(r"^sglang_live_gateway_audio_dropped_seconds_total (.*)$", text, re.M)[1]
    )


async def test_hanging_up_and_calling_again_begins_a_new_session(silence):
    scripts = spoken("One.", 400), spoken("Two.", 400)
    async with scripted(*scripts, sound=silence) as (client, orchestrator, _):
        await ask(client, "Are you there?")
        await said(client, "assistant: One.")
        await client.page.click("#talk")
        await status(client, "not connected")
        await asyncio.wait_for(orchestrator.session.closed.wait(), 20)
        await client.page.click("#talk")
        await status(client, "connected")
        await ask(client, "Still?")
        await said(client, "assistant: Two.")
        assert len(orchestrator.sessions) == 2
