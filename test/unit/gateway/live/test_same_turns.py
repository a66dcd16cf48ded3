"""Claims that a Live session decides about turns as a Realtime session does."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr

from sglang_live.interaction.silero import SileroModel
from test.unit.gateway.fakes import InlineScorer, paced, spoken
from test.unit.gateway.live.world import InlineThread, LiveWorld, sound_of
from test.unit.gateway.realtime.playback_world import World, interrupted_end
from test.unit.gateway.realtime.test_input_transcription import written

AUDIO = Path(__file__).parents[3] / "data" / "audio"
WORDS = "one two three four five six seven eight nine ten"
PIECE = 4800
HEARD = written("What is it?")
# A transcript follows the first audio of each response.
SCRIPTS = [spoken("Yes.", 800), HEARD, paced(WORDS, 60), HEARD, spoken("No.", 800), HEARD]


def recording(name: str) -> bytes:
    """A question, its answer's time, a question into the next answer, silence; at 24 kHz."""
    pcm, rate_hz = soundfile.read(AUDIO / name, dtype="int16")
    said = soxr.resample(pcm, rate_hz, 24_000).astype("<i2").tobytes()
    return b"".join((said, bytes(48_000 * 3), said, bytes(48_000 * 2), said, bytes(48_000 * 3)))


async def by_realtime(microphone: bytes) -> tuple[World, list]:
    world = World(*SCRIPTS)
    world.shared.scorer = InlineScorer(SileroModel())
    world.shared.echo_thread = InlineThread()
    asyncio.get_running_loop().set_default_executor(InlineThread())
    async with world.connect() as client:
        heard = {"turn_detection": {"type": "semantic_vad"}, "transcription": {}}
        client.update(audio={"input": heard})
        await client.settle()
        world.session.on_interrupt = [interrupted_end()]
        for at in range(0, len(microphone), PIECE):
            client.append(microphone[at : at + PIECE])
            await client.settle()
            world.clock.advance(0.1)
    return world, turns_of(world)


async def by_live(microphone: bytes) -> tuple[LiveWorld, list]:
    world = LiveWorld(*SCRIPTS)
    world.shared.scorer = InlineScorer(SileroModel())
    async with world.connect() as client:
        world.session.on_interrupt = [interrupted_end()]
        await client.ticks(len(microphone) // PIECE + 1, microphone)
        # The last tick may be due a rounding later.
        assert len(microphone) // PIECE + 2 - len(sound_of(client.events)) in (0, 1)
    return world, turns_of(world)


def turns_of(world) -> list[list[np.ndarray]]:
    """The user's audio in each turn of the conversation."""
    turns = [turn for turn in world.session.turns if not turn.stateless]
    return [
        [part.pcm for item in turn.history if item.role == "user" for part in item.parts]
        for turn in turns
    ]


@pytest.mark.parametrize("name", ["sp_librivox_0880.flac", "sp_cv651325.flac", "sp_jfk.flac"])
async def test_the_same_microphone_makes_the_same_turns(name):
    microphone = recording(name)
    realtime, realtime_turns = await by_realtime(microphone)
    live, live_turns = await by_live(microphone)
    assert [len(turn) for turn in live_turns] == [len(turn) for turn in realtime_turns]
    assert len(live_turns) >= 3
    for one, other in zip(live_turns, realtime_turns, strict=True):
        for heard, expected in zip(one, other, strict=True):
            assert len(heard) == len(expected)
            # Of an older turn one may be packed, and the other not yet.
            assert np.corrcoef(heard, expected)[0, 1] > 0.99
    for count in ("barge_ins_total", "false_alarms_total"):
        assert live.value(count) == realtime.value(count)
    assert live.value("barge_ins_total") >= (name == "sp_librivox_0880.flac")
