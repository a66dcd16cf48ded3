"""A client that sends back what its loudspeaker plays, through the real speech model."""

from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from scipy.signal import resample_poly

from sglang_live.core import OUTPUT_RATE_HZ, AudioDelta, TranscriptDelta
from sglang_live.interaction.scoring import SpeechScorer
from sglang_live.interaction.silero import SileroModel
from test.unit.gateway.fakes import done, types

from .playback_world import STARTED, World, start

DATA = Path(__file__).parents[3] / "data" / "audio"
PIECE = OUTPUT_RATE_HZ // 10  # samples


def recording(name: str) -> np.ndarray:
    samples, rate_hz = sf.read(DATA / name, dtype="float32")
    assert rate_hz == 16_000
    return 32_768 * resample_poly(samples, 3, 2)


AGENT = recording("sp_jfk.flac")[: 4 * OUTPUT_RATE_HZ]
USER = recording("sp_librivox_0880.flac")[: 2 * OUTPUT_RATE_HZ]
ECHO = 10 ** (-20 / 20) * np.concatenate((np.zeros(OUTPUT_RATE_HZ // 5), AGENT))


@pytest.fixture
def world():
    script = [TranscriptDelta("And so ", 1), AudioDelta(pcm16(AGENT)), done("And so")]
    world = World(script)
    world.shared.scorer = SpeechScorer(SileroModel())
    yield world
    world.shared.close()


def pcm16(samples: np.ndarray) -> bytes:
    return samples.clip(-32_768, 32_767).astype("<i2").tobytes()


async def heard_by(world, client, microphone: np.ndarray) -> list[dict]:
    """The events while the client sends its microphone's audio in real time."""
    events = []
    for first in range(0, len(microphone) - PIECE + 1, PIECE):
        world.clock.advance(PIECE / OUTPUT_RATE_HZ)
        client.append(pcm16(microphone[first : first + PIECE]))
        events += await client.settle()
    return events


async def test_the_agents_own_sound_is_no_voice(world):
    async with world.connect() as client:
        await start(client)
        assert STARTED not in types(await heard_by(world, client, ECHO))
    assert world.value("echo_windows_total") > 20
    assert world.value("barge_ins_total") == world.value("false_alarms_total") == 0


async def test_a_client_can_have_its_echo_heard(world):
    async with world.connect() as client:
        client.turn_detection({"ignore_echo": False})
        await client.until("session.updated")
        await start(client)
        assert STARTED in types(await heard_by(world, client, ECHO))
    assert world.value("echo_windows_total") == 0
    assert world.value("barge_ins_total") == 1


async def test_what_is_sent_at_once_is_no_echo_whatever_it_sounds_like(world):
    quiet = np.zeros(3 * OUTPUT_RATE_HZ)
    async with world.connect() as client:
        await start(client)
        await heard_by(world, client, quiet)
        client.append(pcm16(ECHO[OUTPUT_RATE_HZ : 3 * OUTPUT_RATE_HZ]))
        assert STARTED in types(await client.settle())
    assert world.value("echo_windows_total") == 0


@pytest.mark.parametrize("echo", [ECHO, np.zeros_like(ECHO)], ids=["over an echo", "alone"])
async def test_a_user_still_interrupts(world, echo):
    microphone = echo.copy()
    onset = OUTPUT_RATE_HZ
    microphone[onset : onset + len(USER)] += USER
    async with world.connect() as client:
        await start(client)
        events = await heard_by(world, client, microphone)
        [started] = [event for event in events if event["type"] == STARTED]
        assert 700 <= started["audio_start_ms"] <= 2_000
    assert world.value("barge_ins_total") == 1


async def test_an_echo_that_arrives_when_the_response_is_over_begins_no_turn(world):
    late = 10 ** (-20 / 20) * np.concatenate((np.zeros(OUTPUT_RATE_HZ // 2), AGENT))
    async with world.connect() as client:
        await start(client)
        assert STARTED not in types(await heard_by(world, client, late))
