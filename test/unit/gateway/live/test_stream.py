"""Claims about what a Live session sends at the pace of time."""

import asyncio
import base64
import itertools

import numpy as np
import pytest

from test.unit.gateway.fakes import paced, spoken, types, voice
from test.unit.gateway.live.world import (
    AUDIO,
    HEARD,
    SAID,
    LiveWorld,
    sound_of,
    spoken_ticks,
    text_of,
)
from test.unit.gateway.realtime.playback_world import interrupted_end
from test.unit.gateway.realtime.test_input_transcription import written

WORDS = "one two three four five six seven eight nine ten"


async def test_a_silent_session_is_exact_zeros_at_the_pace_of_time():
    world = LiveWorld()
    async with world.connect() as client:
        assert types(client.events)[:2] == ["session.started", AUDIO]
        await client.ticks(100)
        sound = sound_of(client.events)
        assert len(sound) == 101  # the first at once
        assert all(audio == bytes(4800) for audio in sound)
        assert len(client.events) == 102


async def test_a_stalled_loop_is_made_up_for():
    world = LiveWorld()
    async with world.connect() as client:
        world.clock.advance(0.75)
        await client.rest()
        assert len(sound_of(client.events)) == 8
        world.clock.advance(0.06)
        await client.rest()
        assert len(sound_of(client.events)) == 9


async def test_speech_has_its_answer_with_words_and_times():
    world = LiveWorld(spoken("Good morning to you.", 1200))
    async with world.connect() as client:
        await client.ticks(40, voice(1000))
        heard = spoken_ticks(client.events)
        assert len(heard) == 12 and heard == list(range(heard[0], heard[0] + 12))
        # A second of speech, 0.7 s of silence that end the turn.
        assert 17 <= heard[0] <= 21
        said = client.of(SAID)
        assert text_of(said) == "Good morning to you."
        assert said[0]["start_ms"] >= 100 * heard[0]
        assert said[-1]["end_ms"] <= 100 * (heard[-1] + 3)
        assert all(event["end_ms"] % 200 == 0 for event in said)


async def test_the_users_words_have_their_times():
    world = LiveWorld(spoken("Hello.", 80))
    world.orchestrator.scripts.append(written("What is the time?"))
    async with world.connect() as client:
        await client.ticks(10)
        await client.ticks(40, voice(1000))
        [heard] = client.of(HEARD)
        assert heard["delta"] == "What is the time?"
        # The voice comes after a second; the turn has some audio before it.
        assert 600 <= heard["start_ms"] <= 1000
        assert 1900 <= heard["end_ms"] <= 3000


async def test_an_interruption_is_zeros_at_once_and_ends_the_words():
    world = LiveWorld(paced(WORDS, 60, asyncio.Event()))
    async with world.connect() as client:
        client.send("session.commentary.append", content="Count.", delegation_id=None)
        before = await client.ticks(20)
        assert spoken_ticks(before)
        world.session.on_interrupt = [interrupted_end()]
        interrupted = await client.ticks(15, voice(1000))
        # Within 300 ms of the voice's first sample.
        assert spoken_ticks(interrupted)[-1] < 3
        said = text_of(client.events)
        assert said and "ten" not in said
        await client.ticks(15, bytes(4800))
        answered = world.session.turns[1]
        [item] = [item for item in answered.history if item.role == "assistant"]
        assert item.parts[0].text.split() == said.split()


async def test_a_cough_is_a_short_pause():
    world = LiveWorld(paced(WORDS, 60))
    async with world.connect() as client:
        client.send("session.commentary.append", content="Count.", delegation_id=None)
        await client.ticks(20)
        await client.ticks(60, voice(200))
        sounding = spoken_ticks(client.events)
        assert len(sounding) == 48  # all 4.8 s
        pauses = [after - before for before, after in itertools.pairwise(sounding)]
        assert max(pauses) <= 5  # 300 ms, and what had begun
        assert text_of(client.events) == WORDS


@pytest.mark.parametrize(
    ("form", "silence", "n_bytes"),
    [
        ({"type": "audio/pcm", "rate": 16_000}, b"\0\0", 3200),
        ({"type": "audio/pcmu", "rate": 8_000}, b"\xff", 800),
        ({"type": "audio/pcma", "rate": 8_000}, b"\xd5", 800),
    ],
)
async def test_every_format_has_ticks_of_its_own_size_and_silence(form, silence, n_bytes):
    world = LiveWorld(spoken("Hello.", 800))
    async with world.connect(audio={"format": form}) as client:
        client.send("session.commentary.append", content="Greet.", delegation_id=None)
        await client.ticks(30)
        sound = sound_of(client.events)
        assert all(len(audio) == n_bytes for audio in sound)
        silent = silence * (n_bytes // len(silence))
        assert sum(audio != silent for audio in sound) in (8, 9)  # a resampler's tail


async def test_usage_is_told_every_quarter_of_a_minute_and_is_a_sum():
    world = LiveWorld()
    async with world.connect() as client:
        await client.ticks(310)
        usage = client.of("session.usage.updated")
        assert [event["usage"]["seconds"] for event in usage] == [15.0, 30.0]


async def test_a_client_that_sends_nothing_is_silent():
    world = LiveWorld(spoken("Yes.", 400))
    async with world.connect() as client:
        client.append(voice(1000))  # and no more
        await client.ticks(40)
        assert spoken_ticks(client.events)
        assert world.session.turns[0].history[-1].role == "user"


async def test_audio_far_ahead_of_time_is_refused():
    world = LiveWorld()
    async with world.connect() as client:
        client.append(bytes(48_000 * 30))
        client.append(bytes(48_000))
        await client.rest()
        [error] = client.of("error")
        assert error["error"]["code"] == "input_audio_buffer_full"
        await client.ticks(20)
        client.append(bytes(48_000))
        await client.ticks(2)
        assert len(client.of("error")) == 1


async def test_a_muted_voice_is_silence_and_never_heard_later():
    world = LiveWorld(spoken("Yes.", 400))
    async with world.connect() as client:
        client.send("session.input_audio.mute", event_id="m1")
        await client.ticks(15, voice(1500))
        client.send("session.input_audio.unmute")
        await client.ticks(25, bytes(4800))
        assert not spoken_ticks(client.events) and not world.session.turns
        [muted] = client.of("session.input_audio.muted")
        assert muted["client_event_id"] == "m1"
        [unmuted] = client.of("session.input_audio.unmuted")
        assert "client_event_id" not in unmuted
        await client.ticks(30, voice(1000))
        assert spoken_ticks(client.events)


async def test_a_mute_in_the_middle_of_a_word_ends_the_turn():
    world = LiveWorld(spoken("Yes.", 400))
    async with world.connect() as client:
        await client.ticks(5, voice(500))
        client.send("session.input_audio.mute")
        await client.ticks(30, voice(3000))
        [turn] = [turn for turn in world.session.turns if not turn.stateless]
        assert turn.history[-1].parts[0].duration_s < 2


async def test_a_fixture_takes_the_place_of_the_voice_and_of_the_users():
    world = LiveWorld(paced(WORDS, 60, asyncio.Event()))
    async with world.connect() as client:
        client.send("session.commentary.append", content="Count.", delegation_id=None)
        await client.ticks(10)
        beep = (np.ones(24_000) * 999).astype("<i2").tobytes()
        client.send(
            "session.output_audio.fixture.play",
            audio=base64.b64encode(beep[:-1000]).decode(),
            event_id="f1",
        )
        client.append(voice(300))
        events = await client.ticks(15, voice(300))
        beeps = [audio for audio in sound_of(events) if b"\xe7\x03" in audio]
        assert len(beeps) == 10
        assert b"".join(beeps) == beep[:-1000] + bytes(1000)
        assert types([e for e in client.events if "fixture" in e["type"]]) == [
            "session.output_audio.fixture.playing",
            "session.output_audio.fixture.played",
        ]
        client.send("session.thinking.append", content="x", delegation_id=None)
        assert not client.of("error")


async def test_nothing_is_heard_from_the_fixtures_event_on():
    world = LiveWorld()
    async with world.connect() as client:
        sound = base64.b64encode(voice(500)).decode()
        client.send("session.output_audio.fixture.play", audio=sound)
        client.append(voice(500))
        await client.ticks(30)
        assert not world.session.turns
        await client.ticks(30, voice(500))
        assert world.session.turns


async def test_what_the_voice_says_last_is_told_when_the_session_closes():
    world = LiveWorld(spoken("Well then goodbye my friend.", 2000))
    async with world.connect() as client:
        client.send("session.commentary.append", content="Bye.", delegation_id=None)
        await client.ticks(12)
        client.send("session.close", event_id="end")
        await client.rest()
        closed = client.events[-1]
        assert closed["type"] == "session.closed" and closed["client_event_id"] == "end"
        assert closed["reason"] == "close_requested"
        assert closed["usage"]["seconds"] == len(sound_of(client.events)) / 10
    assert world.wire.closed == (1000, "close_requested")
