"""Codec frames from the scheduler's reports to the job that sends them."""

import asyncio

import pytest

from sglang_live.errors import StageFailedError
from sglang_live.stages.talker import response
from sglang_live.stages.talker.response import FrameQueue, SpeechBound

pytestmark = pytest.mark.usefixtures("must_not_hang")


async def test_frames_that_wait_go_together():
    frames = FrameQueue()
    for n in range(3):
        frames.put(n, [n, n])
    assert await frames.next() == [[0, 0], [1, 1], [2, 2]]
    frames.put(3, [3, 3])
    assert await frames.next() == [[3, 3]]
    assert frames.n_sent == 4


async def test_the_number_of_frames_in_one_message_is_limited():
    frames = FrameQueue()
    for n in range(response.MOST_AT_ONCE + 3):
        frames.put(n, [n])
    await frames.expect(response.MOST_AT_ONCE + 3)
    assert len(await frames.next()) == response.MOST_AT_ONCE
    assert len(await frames.next()) == 3
    assert await frames.next() == []


async def test_the_end_is_known_when_all_frames_have_come():
    frames = FrameQueue()
    frames.put(0, [0])
    ending = asyncio.create_task(frames.expect(2))
    assert await frames.next() == [[0]]
    taking = asyncio.create_task(frames.next())
    await asyncio.sleep(0)
    assert not ending.done()
    frames.put(1, [1])
    await ending
    assert await taking == [[1]]
    assert await frames.next() == []


async def test_frames_that_another_engine_has_made_are_not_sent_again():
    frames = FrameQueue(n_known=2)
    frames.put(1, [1])  # the newest one that was prefilled
    frames.put(2, [2])
    await frames.expect(3)
    assert await frames.next() == [[2]] and frames.n_sent == 3
    assert await frames.next() == []
    ended = FrameQueue(n_known=2)
    await ended.expect(2)
    assert await ended.next() == []


async def test_frames_beyond_the_bound_are_left_out():
    """The engine makes some until it is told to end: how many depends on the machine."""
    bound = SpeechBound(1000, n_ids=2)
    most = SpeechBound(1000, n_ids=2, is_complete=True).max_frames
    frames = FrameQueue(bound=bound)
    for n in range(most):
        frames.put(n, [n])
    bound.is_complete = True
    frames.put(most, [most])
    await frames.expect(most + 1)
    assert await frames.next() == [[n] for n in range(most)]
    assert await frames.next() == []


async def test_frames_that_were_sent_before_the_bound_was_known_count():
    bound = SpeechBound(1000, n_ids=2)
    frames = FrameQueue(bound=bound)
    for n in range(200):
        frames.put(n, [n])
    assert len(await frames.next()) == 200
    bound.is_complete = True
    await frames.expect(201)
    assert await frames.next() == [] and frames.n_sent == 200


async def test_a_reply_without_frames_ends_at_once():
    frames = FrameQueue()
    await frames.expect(0)
    assert await frames.next() == []


async def test_frames_that_never_come_fail_the_reply(monkeypatch):
    monkeypatch.setattr(response, "FRAMES_TIMEOUT_S", 0.01)
    frames = FrameQueue()
    frames.put(0, [0])
    with pytest.raises(StageFailedError, match="1 of 2 codec frames"):
        await frames.expect(2)


def test_a_frame_out_of_order_is_a_bug():
    with pytest.raises(AssertionError, match="frame 1 came, 0 was next"):
        FrameQueue().put(1, [0])
