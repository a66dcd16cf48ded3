"""The published speaker encoder: its embeddings are those of its package, and tell people apart."""

from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from scipy.signal import resample_poly

from sglang_live.interaction.filters.other_voices import SpeakerThread
from sglang_live.interaction.filters.voiceprint import Voiceprint, parts_of
from sglang_live.interaction.scoring import SpeechScorer
from sglang_live.interaction.silero import SileroModel
from sglang_live.models.packages import RESEMBLYZER, fetch
from sglang_live.models.resemblyzer import SpeakerEncoder
from test.unit.gateway.fakes import spoken
from test.unit.gateway.realtime.playback_world import STARTED, World
from test.unit.gateway.realtime.test_other_voices import learnt, over
from test.unit.gateway.realtime.test_voice_over_response import long_response, pcm16

LIBRIVOX = "sp_librivox_0880.flac"
DATA = Path(__file__).parents[1] / "data" / "audio"
# By resemblyzer 0.1.4 with librosa 0.11.0, of JFK from 0.5 to 2 s at -25 dB: where it is not zero.
GOLDEN = {
    41: 0.01097,
    78: 0.01629,
    79: 0.09691,
    86: 0.07642,
    135: 0.13438,
    146: 0.06204,
    162: 0.16276,
    179: 0.04667,
    203: 0.29804,
    208: 0.03006,
    251: 0.11584,
}


@pytest.fixture(scope="module")
def encoder():
    return SpeakerEncoder.load(fetch(RESEMBLYZER))


def recording(name: str) -> np.ndarray:
    samples, rate_hz = sf.read(DATA / name, dtype="int16")
    assert rate_hz == 16_000
    return samples


def test_an_embedding_is_that_of_the_package(encoder):
    [[embedding]] = encoder.embed([recording("sp_jfk.flac")[8_000:32_000]])
    for at, value in GOLDEN.items():
        assert embedding[at] == pytest.approx(value, abs=2e-5)


def test_another_persons_voice_is_less_similar_than_the_users_own(encoder):
    jfk, austen = recording("sp_jfk.flac"), recording(LIBRIVOX)
    user = Voiceprint()
    user.learn(encoder.embed(*parts_of(jfk[-64_000:])))
    own, other = (encoder.embed([pcm[8_000 : 8_000 + 15_360]])[0, 0] for pcm in (jfk, austen))
    assert user.similarity(30, own) > user.similarity(30, other) + 0.1


async def test_over_a_response_only_the_users_voice_interrupts(encoder):
    user, other = (resample_poly(recording(n), 3, 2) for n in ("sp_jfk.flac", LIBRIVOX))
    world = World(long_response(), spoken("Yes?"), knows_voices=True)
    world.shared.scorer = SpeechScorer(SileroModel())
    world.shared.speaker_thread = SpeakerThread(encoder, patience_s=10.0)
    try:
        async with world.connect() as client:
            client.append(pcm16(np.concatenate((user[:55_200], np.zeros(24_000)))))
            await client.until("response.created")
            await client.find("response.output_audio.delta")
            await learnt(world)
            assert STARTED not in await over(world, client, other, np.zeros(24_000))
            assert STARTED in await over(world, client, user[105_600:160_000])
    finally:
        world.shared.close()
    assert world.value("voice_over_response_total", decision="other_voice", reason="far") >= 1
