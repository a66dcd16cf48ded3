"""Claims about a Live session of a model that hears while it speaks."""

import asyncio
import base64
from itertools import pairwise

import numpy as np
import pytest

from sglang_live.errors import StageFailedError
from sglang_live.gateway.live.duplex_voice import _BEGIN_MS, _MOST_MS
from sglang_live.orchestrator.duplex import SpokenFrame
from test.unit.gateway.live.world import (
    AUDIO,
    SAID,
    LiveWorld,
    errors,
    is_zero,
    sound_of,
    spoken_ticks,
    text_of,
)

FRAME_S, FRAME = 0.08, 1920


class FakeCall:
    """
    heard: the values of the user's frames.
    coming: what run() yields, or raises.
    n_said: frames that were put there. is_closed: run() was closed.
    """

    def __init__(self, clock):
        self._clock, self._began_s = clock, 0.0
        self.heard: list[int] = []
        self.coming: asyncio.Queue = asyncio.Queue()
        self.waits, self.n_missing, self.n_said, self.is_closed = True, 0, 0, False

    @property
    def n_early(self) -> float:
        passed_s = self._clock.now_s() - self._began_s
        return 0.0 if self.waits else len(self.heard) - passed_s / FRAME_S

    def hear(self, pcm: bytes) -> bool:
        if self.waits:
            self.waits, self._began_s = False, self._clock.now_s()
        assert len(pcm) == 2 * FRAME
        self.heard.append(int(np.frombuffer(pcm, "<i2")[FRAME // 2]))
        return True

    async def run(self):
        try:
            while True:
                if isinstance(came := await self.coming.get(), Exception):
                    raise came
                yield came
        finally:
            self.is_closed = True

    def say(self, n: int = 1) -> None:
        """Frames of the values 1, 2, 3, …, each with a word."""
        for _ in range(n):
            self.n_said += 1
            sound = np.full(FRAME, self.n_said, "<i2").tobytes()
            self.coming.put_nowait(SpokenFrame(sound, f" w{self.n_said}", 0.03))


class DuplexWorld(LiveWorld):
    def __init__(self, n_said: int = 1, **config):
        super().__init__(**config)
        self.call = FakeCall(self.clock)
        self.orchestrator.duplex_s, self.orchestrator.call = FRAME_S, self.call
        self.call.say(n_said)  # a call begins with its first frame


async def live(client, call: FakeCall, n_ticks: int, microphone: bytes = b"") -> list[dict]:
    """Ticks in which the model makes as much sound as time passes."""
    events = []
    for tick in range(n_ticks):
        passed_s = call._clock.now_s() - call._began_s
        call.say(max(0, int(passed_s / FRAME_S + 1e-9) + 3 - call.n_said))
        piece = microphone[4800 * tick :][:4800]
        events += await client.ticks(1, piece)
    return events


async def test_it_is_heard_without_a_gap_and_without_any_audio_of_the_client():
    world = DuplexWorld()
    async with world.connect() as client:
        assert client.of("session.started")
        await live(client, world.call, 40)
        ticks = spoken_ticks(client.events)
        assert ticks == list(range(ticks[0], len(sound_of(client.events)))) and ticks[0] <= 2
        sound = np.frombuffer(b"".join(sound_of(client.events)[ticks[0] :]), "<i2")
        # Every sample of every frame, in order.
        assert np.array_equal(sound, 1 + np.arange(len(sound)) // FRAME)
    assert world.call.is_closed
    assert world.value("frames_total", outcome="skipped") in (None, 0.0)


async def test_words_leave_with_their_sound_and_their_times():
    world = DuplexWorld()
    async with world.connect() as client:
        await live(client, world.call, 30)
        client.send("session.close")
        await client.rest()
        n_heard = len(spoken_ticks(client.events)) * 100 // 80
        assert text_of(client.events) == "".join(f" w{n}" for n in range(1, n_heard + 1))
        said = client.of(SAID)
        assert all(one["end_ms"] <= later["start_ms"] for one, later in pairwise(said))
        assert client.of("session.closed")[0]["usage"]["seconds"] == pytest.approx(3.0, abs=0.2)


async def test_where_the_model_is_late_whole_ticks_are_silent():
    world = DuplexWorld()
    async with world.connect() as client:
        await live(client, world.call, 10)
        before = len(sound_of(client.events))
        await client.ticks(8)  # it says nothing
        silent = [is_zero(one) for one in sound_of(client.events)[before:]]
        first = silent.index(True)
        assert all(silent[first:]), "no tick is a part of a frame and silence"
        world.call.say(1)
        [tick] = sound_of(await client.ticks(1))
        assert is_zero(tick), "less than there has to be"
        world.call.say(2)
        [tick] = sound_of(await client.ticks(1))
        assert not is_zero(tick)


async def test_what_was_late_does_not_delay_all_that_follows():
    world = DuplexWorld()
    async with world.connect() as client:
        await live(client, world.call, 10)
        world.call.say(40)  # of a time that has passed
        await client.ticks(1)
        assert world.value("frames_total", outcome="skipped") >= 1
        last = np.frombuffer(sound_of(client.events)[-1], "<i2")[-1]
        assert (world.call.n_said - last) * 80 <= _MOST_MS
        assert _BEGIN_MS < _MOST_MS
        await client.ticks(2)
        said = text_of(client.events).split()
        assert said == [f"w{n}" for n in range(1, len(said) + 1)] and len(said) >= last


async def test_the_users_frames_are_passed_on_at_the_pace_of_time():
    world, frames = DuplexWorld(), np.repeat(np.arange(1, 26, dtype="<i2"), FRAME)
    async with world.connect() as client:
        assert world.call.heard == [0], "a call begins with silence"
        client.append(frames.tobytes())  # 2 s at once
        await client.rest()
        assert len(world.call.heard) <= 3
        await live(client, world.call, 10)
        assert 11 <= len(world.call.heard) <= 15
        await live(client, world.call, 20)
        # The call fills the gap behind them by its own clock.
        assert world.call.heard == [0, *range(1, 26)]
        client.send("session.input_audio.mute")
        client.append(np.full(2 * FRAME, 9, "<i2").tobytes())
        await live(client, world.call, 4)
        assert world.call.heard[26:] == [0, 0]
        world.call.waits = True  # a stage has ended
        await client.ticks(1)
        assert not world.call.waits, "without any audio of the client"


async def test_its_settings_are_those_of_the_session():
    world = DuplexWorld()
    async with world.connect(instructions="Be brief.", audio={"output": {"voice": "bob"}}):
        assert world.session.call_settings == {
            "voice": "bob",
            "role": "Be brief.",
            "temperature": None,
            "window_frames": None,
        }


async def test_other_formats_have_all_of_its_sound():
    world = DuplexWorld()
    form = {"format": {"type": "audio/pcmu", "rate": 8000}}
    async with world.connect(audio=form) as client:
        await live(client, world.call, 20)
        assert {len(audio) for audio in sound_of(client.events)} == {800}
        assert len([one for one in sound_of(client.events) if one.strip(b"\xff")]) >= 16


@pytest.mark.parametrize(
    ("session", "param"),
    [
        ({"delegation": {"type": "client"}}, "session.delegation"),
        (
            {"delegation": {"type": "responses", "responses": {"model": "x"}}},
            "session.delegation",
        ),
        (
            {
                "input": [
                    {
                        "type": "message",
                        "role": "user",
                        "content": [{"type": "input_text", "text": "Hi."}],
                    }
                ]
            },
            "session.input",
        ),
        ({"audio": {"output": {"voice": "erik"}}}, "session.audio.output.voice"),
    ],
)
async def test_what_such_a_model_cannot_do_is_refused_at_the_start(session, param):
    world = DuplexWorld()
    async with world.connect(**session) as client:
        [error] = errors(client.events)
        assert error["param"] == param
        assert not client.of("session.started") and not world.call.heard


async def test_what_such_a_model_cannot_do_is_refused_later_and_changes_nothing():
    world = DuplexWorld()
    async with world.connect() as client:
        for kind in ("instructions", "thinking", "commentary"):
            client.send(f"session.{kind}.append", content="Go on.", delegation_id=None)
        client.send("session.update", session={"delegation": None})
        client.send("response.create")
        await client.rest()
        told = [error["message"] for error in errors(client.events)]
        assert ["hears and speaks at the same time" in one for one in told] == [True] * 4 + [False]
        assert "does not delegate" in told[-1]
        await live(client, world.call, 5)
        assert spoken_ticks(client.events)


async def test_a_fixture_takes_its_place():
    world = DuplexWorld()
    async with world.connect() as client:
        await live(client, world.call, 8)
        sound = np.full(4800, 30_000, "<i2").tobytes()
        before = len(sound_of(client.events))
        audio = base64.b64encode(sound).decode()
        client.send("session.output_audio.fixture.play", audio=audio)
        await live(client, world.call, 12)
        ticks = [np.frombuffer(one, "<i2") for one in sound_of(client.events)[before:]]
        loud = [int(tick.max()) == 30_000 for tick in ticks]
        assert sum(loud) == 2 and any(tick.any() for tick in ticks[loud.index(True) + 3 :])


async def test_a_call_that_cannot_begin_ends_the_session_by_name():
    world = DuplexWorld(n_said=0)
    world.call.coming.put_nowait(StageFailedError("this model takes no instructions"))
    async with world.connect(instructions="Be a pirate.") as client:
        [error] = errors(client.events)
        assert "takes no instructions" in error["message"]
        assert not client.of("session.started", AUDIO)
        assert client.wire.closed is not None


async def test_a_call_that_ends_is_the_end_of_the_session():
    world = DuplexWorld()
    async with world.connect() as client:
        await live(client, world.call, 5)
        world.call.coming.put_nowait(StageFailedError("the engine has ended a call"))
        await client.ticks(2)
        [error] = errors(client.events)
        assert "ended a call" in error["message"]
        n = len(client.of(AUDIO))
        await client.ticks(3)
        assert len(client.of(AUDIO)) == n
