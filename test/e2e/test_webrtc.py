"""A call over WebRTC: a question is heard and answered, also when packets are lost."""

import asyncio
from pathlib import Path

import httpx
import numpy as np
import pytest
import soundfile as sf
import soxr

import sglang_live
from sglang_live.webrtc.messages import SENT_RATE_HZ
from test.calls import calling
from test.e2e.conftest import Server, running_server

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def talking(tmp_path_factory) -> Server:
    with running_server("demo", tmp_path_factory.mktemp("talking")) as running:
        yield running


QUESTION = Path(sglang_live.__file__).parent / "assets" / "question.flac"


def question() -> np.ndarray:
    pcm, rate_hz = sf.read(QUESTION, dtype="float32")
    return (soxr.resample(pcm, rate_hz, SENT_RATE_HZ) * 32_767).astype(np.int16)


@pytest.mark.parametrize("loss", [0.0, 0.02])
async def test_a_question_is_answered_aloud(talking, loss):
    async with (
        httpx.AsyncClient(base_url=talking.http, timeout=30) as http,
        calling(http, loss) as caller,
    ):
        await asyncio.sleep(0.5)
        caller.microphone.say(question())
        said = await caller.find("response.output_audio_transcript.done", 60)
        assert said["transcript"] == "Paris is the capital of France."
        await caller.until("output_audio_buffer.stopped", 30)
        await asyncio.sleep(0.3)
        sound = caller.sound()
        assert 1.5 < len(sound) / SENT_RATE_HZ < 6 and sound.std() > 500
