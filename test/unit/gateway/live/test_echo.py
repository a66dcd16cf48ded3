"""Claims about the agent's own sound in the microphone of a Live session."""

import numpy as np

from sglang_live.core import AudioDelta, TranscriptDelta
from test.unit.gateway.fakes import done
from test.unit.gateway.live.world import LiveWorld, sound_of, spoken_ticks

PIECE = 4800


def babble(seconds: float) -> bytes:
    """Loud noise, unlike any tone: its echo has one delay."""
    noise = np.random.default_rng(3).normal(0, 6000, int(seconds * 24_000))
    return noise.clip(-20_000, 20_000).astype("<i2").tobytes()


async def test_the_agent_does_not_interrupt_itself_though_ticks_come_late():
    sound = babble(4)
    pieces = [AudioDelta(sound[at : at + 3840]) for at in range(0, len(sound), 3840)]
    world = LiveWorld([TranscriptDelta("A long story. "), *pieces, done("A long story. ")])
    late = np.random.default_rng(1).uniform(0, 0.04, 60)
    async with world.connect() as client:
        client.send("session.commentary.append", content="Go.", delegation_id=None)
        played = b""
        for tick in range(60):
            # The loudspeaker plays it 250 ms later, the microphone hears half of it.
            echo = played[-2 * PIECE - 2400 :][:PIECE] if len(played) > 3 * PIECE else bytes(PIECE)
            client.append((np.frombuffer(echo, "<i2") // 2).astype("<i2").tobytes())
            await client.rest()
            # Ticks are late by up to 40 ms, each by another time.
            before = late[tick - 1] if tick else 0.0
            world.clock.advance(0.1 + late[tick] - before)
            await client.rest()
            played = b"".join(sound_of(client.events))
        assert len(spoken_ticks(client.events)) == 40
        assert world.value("barge_ins_total") == 0
        assert world.value("echo_windows_total") > 20
