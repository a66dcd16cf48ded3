"""Phone calls through the demo: users' questions are heard and answered in G.711."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import PIPE
from urllib.parse import urlsplit
from xml.etree import ElementTree

import httpx
import numpy as np
import pytest
import soundfile as sf
import soxr
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from test.e2e.conftest import TELEPHONY_TOKEN
from test.e2e.test_webrtc import QUESTION
from test.phones import RATE_HZ, Service, Telnyx, Twilio, phoning, signature

pytestmark = pytest.mark.e2e

WEBHOOK = Path(__file__).parents[2] / "docs" / "examples" / "twilio_answer.py"


def question() -> np.ndarray:
    pcm, rate_hz = sf.read(QUESTION, dtype="float32")
    return (soxr.resample(pcm, rate_hz, RATE_HZ) * 32_767).astype(np.int16)


async def until_silent(service: Service) -> None:
    n_played = 0
    while n_played < len(service.played):
        n_played = len(service.played)
        await asyncio.sleep(1.0)


async def test_a_users_question_is_answered(talking):
    sent = {"x-telnyx-streaming-auth-token": TELEPHONY_TOKEN}
    async with phoning(Telnyx, f"127.0.0.1:{talking.port}", sent) as service:
        await asyncio.sleep(0.5)
        service.say(question())
        await service.until_played(1.5, 60)
        await until_silent(service)
        assert service.n_clears == 0
        sound = service.sound()
        # "Paris is the capital of France."
        assert 1.5 < len(sound) / RATE_HZ < 6 and sound.std() > 500
    talking.wait_until_free()


@asynccontextmanager
async def webhook(server_url: str) -> AsyncIterator[str]:
    """The example of docs/, as a number's webhook. Yields its address."""
    command = (sys.executable, WEBHOOK, server_url, "--port", "0")
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.kill()
        await process.communicate()


async def event_of(sideband, kind: str, **fields: str) -> dict:
    async with asyncio.timeout(60):
        while True:
            event = json.loads(await sideband.recv())
            if event["type"] == kind and fields.items() <= event.items():
                return event


async def test_twilio_speaks_interrupts_and_presses_keys(talking):
    """What Twilio is told by the example's webhook, and then does."""
    own = f"ws://127.0.0.1:{talking.port}"
    async with webhook(own) as address, httpx.AsyncClient() as http:
        twiml = (await http.post(address, data={"CallSid": Twilio.call})).text
    url = ElementTree.fromstring(twiml).find("Connect/Stream").get("url")
    parts = urlsplit(url)
    assert parts.path == Twilio.path
    for wrong in (
        {},
        signature(url, "other"),
        signature(url.replace("ws:", "wss:"), TELEPHONY_TOKEN),
    ):
        with pytest.raises(InvalidStatus, match="401"):
            async with phoning(Twilio, parts.netloc, wrong):
                pass
    async with phoning(Twilio, parts.netloc, signature(url, TELEPHONY_TOKEN)) as service:
        await asyncio.sleep(0.5)
        async with connect(f"{own}/v1/realtime?call_id={Twilio.call}") as sideband:
            service.say(question())
            await service.until_played(0.4, 60)
            # The user does not wait for the end of "Paris is the capital of France."
            service.say(question())
            cut = await event_of(sideband, "conversation.item.truncated")
            heard_s = len(service.played) / RATE_HZ
            # What waits is dropped, unless all was played while the server held the rest back.
            async with asyncio.timeout(10):
                while service.waits:
                    await asyncio.sleep(0.02)
            await asyncio.sleep(0.1)
            assert service.n_clears == 1 or (service.ran_dry and not service.n_clears)
            assert len(service.played) / RATE_HZ < heard_s + 0.45
            assert cut["audio_end_ms"] == pytest.approx(1000 * heard_s, abs=450)
            # And is answered.
            await service.until_played(heard_s + 1.5, 60)
            await until_silent(service)
            n_played = len(service.played)
            for key in "42#":
                await service.press(key)
                kind = "input_audio_buffer.dtmf_event_received"
                assert (await event_of(sideband, kind))["event"] == key
            await event_of(sideband, "response.created")
            await service.until_played((n_played + 1000) / RATE_HZ, 60)
            # Keys interrupt at once.
            async with asyncio.timeout(60):
                while len(service.waits) < 10:
                    await asyncio.sleep(0.01)
            n_clears = service.n_clears
            for key in "7#":
                await service.press(key)
            async with asyncio.timeout(10):
                while service.n_clears == n_clears:
                    await asyncio.sleep(0.02)
    told = {message["event"] for message in service.told}
    assert told == {"mark", "clear"}
    talking.wait_until_free()
