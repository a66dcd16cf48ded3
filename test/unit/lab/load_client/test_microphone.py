import asyncio

import pytest

from lab.load_client.microphone import Microphone
from lab.load_client.utterance import Utterance, silence_message
from sglang_live.client import clip
from sglang_live.clock import SimClock


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
async def open_microphone():
    clock, sent = SimClock(), []

    async def send(message):
        sent.append(message)

    microphone = Microphone(clock, send)
    task = asyncio.create_task(microphone.stay_open())
    await settle()
    yield clock, microphone, sent
    task.cancel()


async def test_an_open_microphone_sends_silence_every_20_ms(open_microphone):
    clock, _, sent = open_microphone
    for n_sent in range(1, 6):
        assert sent == [silence_message()] * n_sent
        clock.advance(clip.FRAME_S)
        await settle()


async def test_the_end_of_speech_is_reported_when_its_frame_was_sent(open_microphone):
    clock, microphone, sent = open_microphone
    n_sent = []
    microphone.queue(
        Utterance.of(b"\1\1" * 3 * (clip.FRAME_BYTES // 2)).messages,
        {2: lambda: n_sent.append(len(sent))},
    )
    for _ in range(4):
        clock.advance(clip.FRAME_S)
        await settle()
    assert n_sent == [3], "one frame of silence, then two of the clip"
    assert sent[4] == silence_message()


async def test_a_late_frame_is_counted_and_the_pace_recovers(open_microphone):
    clock, microphone, sent = open_microphone
    clock.advance(10 * clip.FRAME_S)
    await settle()
    await settle()
    await settle()
    assert len(sent) == 11, "the average pace stays real time"
    assert microphone.frames_late > 0


async def test_push_to_talk_stops_after_the_last_word():
    sent = []

    async def send(message):
        sent.append(message)

    clock = SimClock()
    microphone = Microphone(clock, send)
    microphone.queue(Utterance.of(bytes(2 * clip.FRAME_BYTES)).messages, {})
    task = asyncio.create_task(microphone.send_queued())
    for _ in range(3):
        await settle()
        clock.advance(clip.FRAME_S)
    await asyncio.wait_for(task, 10.0)
    assert len(sent) == 2
