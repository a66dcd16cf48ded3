"""A family from a folder outside the package, in the whole server."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from test.e2e.conftest import Server, running_server
from test.e2e.socket_client import NO_VAD, clip_24k, connected
from test.engine import tiny_cascade

pytestmark = [pytest.mark.e2e]

FOLDER = Path(__file__).parent / "families"
TRANSCRIBED = "conversation.item.input_audio_transcription.completed"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("toy")
    tiny_cascade.build(folder)
    config = folder / "llm" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "toy": True}))
    paths = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    with running_server(
        str(folder / "llm"),
        folder,
        "--model-family",
        "toy_family",
        environment={"PYTHONPATH": paths},
    ) as running:
        yield running


async def test_it_hears_thinks_and_speaks(server):
    async with connected(server.ws) as socket:
        audio = {"input": {"turn_detection": None, "transcription": {"model": "demo"}}}
        await socket.session(audio=audio)
        done = await socket.say(clip_24k("sp_jfk.flac", 3.0), max_output_tokens=30)
        assert done["response"]["status"] == "incomplete"  # its model ends no response
        if not any(event["type"] == TRANSCRIBED for event in socket.events):
            await socket.until(TRANSCRIBED)
        [transcript] = [e["transcript"] for e in socket.events if e["type"] == TRANSCRIBED]
        assert transcript == "loud"
        sound = socket.audio().astype(float)
    assert len(sound) > 2_400
    spectrum = np.abs(np.fft.rfft(sound))
    hz = spectrum.argmax() * 24_000 / len(sound)
    assert 990 < hz < 1_010


async def test_two_users_are_served_at_once(server):
    async def call(text: str) -> int:
        async with connected(server.ws) as socket:
            await socket.session(**NO_VAD)
            await socket.ask(text, max_output_tokens=12)
            return len(socket.audio())

    assert all(await asyncio.gather(call("one"), call("two")))
