"""A phone call through the demo: a user's question is heard and answered in G.711."""

import asyncio

import numpy as np
import pytest
import soundfile as sf
import soxr

from test.e2e.conftest import TELEPHONY_TOKEN
from test.e2e.test_webrtc import QUESTION
from test.phones import RATE_HZ, Telnyx, phoning

pytestmark = pytest.mark.e2e


def question() -> np.ndarray:
    pcm, rate_hz = sf.read(QUESTION, dtype="float32")
    return (soxr.resample(pcm, rate_hz, RATE_HZ) * 32_767).astype(np.int16)


async def test_a_users_question_is_answered(talking):
    sent = {"x-telnyx-streaming-auth-token": TELEPHONY_TOKEN}
    async with phoning(Telnyx, f"127.0.0.1:{talking.port}", sent) as service:
        await asyncio.sleep(0.5)
        service.say(question())
        await service.until_played(1.5, 60)
        n_played = 0
        while n_played < len(service.played):
            n_played = len(service.played)
            await asyncio.sleep(1.0)
        assert service.n_clears == 0
        sound = service.sound()
        # "Paris is the capital of France."
        assert 1.5 < len(sound) / RATE_HZ < 6 and sound.std() > 500
    talking.wait_until_free()
