"""Speech as text for a language model: each clip is recognised once, and failures are told."""

import asyncio
import threading

import numpy as np
import pytest

from sglang_live.core import AudioPart, HistoryItem, TextPart
from sglang_live.errors import StageFailedError
from sglang_live.stages.thinker.hearing import Hearing, IdHearing


class FakeRecogniser:
    """Hears the number of samples."""

    def __init__(self):
        self.heard: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fails = False

    def transcribe(self, pcm: np.ndarray) -> str:
        self.gate.wait(10)
        if self.fails:
            raise RuntimeError("no model")
        self.heard.append(len(pcm))
        return f"{len(pcm)} samples" if len(pcm) else ""


def clip(n: int) -> AudioPart:
    return AudioPart(np.arange(n, dtype=np.int16))


def said(*parts: AudioPart | TextPart) -> HistoryItem:
    return HistoryItem(key="k", role="user", parts=parts)


@pytest.fixture
def recogniser() -> FakeRecogniser:
    return FakeRecogniser()


@pytest.fixture
def hearing(recogniser) -> Hearing:
    return Hearing(recogniser)


async def test_words_take_the_place_of_the_audio(hearing):
    item = await hearing.as_text(said(clip(5), TextPart("and this"), clip(7)))
    assert item.parts == (TextPart("5 samples and this 7 samples"),)
    assert (item.key, item.role) == ("k", "user")


async def test_text_alone_is_left_as_it_is(hearing, recogniser):
    item = said(TextPart("hello"))
    assert await hearing.as_text(item) is item
    assert recogniser.heard == []


async def test_silence_leaves_no_word_and_no_space(hearing):
    item = await hearing.as_text(said(clip(0), TextPart("hello")))
    assert item.parts == (TextPart("hello"),)


async def test_words_of_an_utterance_in_pieces_are_separate(hearing):
    pieces = [(clip(5), True, False), (clip(7), False, False), (None, False, True)]
    items = [
        HistoryItem(key="k", role="user", parts=(part,) if part else (), opens=opens, closes=closes)
        for part, opens, closes in pieces
    ]
    heard = [await hearing.as_text(item) for item in items]
    assert [item.parts for item in heard] == [
        (TextPart("5 samples"),),
        (TextPart(" 7 samples"),),
        (),
    ]
    assert [(item.opens, item.closes) for item in heard] == [p[1:] for p in pieces]


async def test_a_clip_is_recognised_once_also_at_the_same_time(hearing, recogniser):
    recogniser.gate.clear()
    both = [asyncio.create_task(hearing.transcript_of(clip(5).pcm)) for _ in range(2)]
    await asyncio.sleep(0)
    recogniser.gate.set()
    assert await asyncio.gather(*both) == ["5 samples"] * 2
    assert await hearing.transcript_of(clip(5).pcm) == "5 samples"
    assert recogniser.heard == [5] and hearing.counts["clips_recognised"] == 1


async def test_a_cancelled_turn_leaves_the_recognition_to_the_next(hearing, recogniser):
    recogniser.gate.clear()
    first = asyncio.create_task(hearing.transcript_of(clip(5).pcm))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    recogniser.gate.set()
    assert await hearing.transcript_of(clip(5).pcm) == "5 samples"
    assert recogniser.heard == [5]


async def test_a_failed_transcript_is_told_and_tried_again(hearing, recogniser):
    recogniser.fails = True
    with pytest.raises(StageFailedError, match="the recogniser failed: no model"):
        await hearing.transcript_of(clip(5).pcm)
    recogniser.fails = False
    assert await hearing.transcript_of(clip(5).pcm) == "5 samples"
    assert hearing.counts["recognitions_failed"] == 1


async def test_a_clip_that_failed_its_turn_has_no_words_in_the_next(hearing, recogniser):
    """Otherwise no later turn of the conversation would be answered."""
    recogniser.fails = True
    with pytest.raises(StageFailedError, match="the recogniser failed: no model"):
        await hearing.as_text(said(clip(5)))
    assert (await hearing.as_text(said(clip(5)))).parts == (TextPart(""),)
    assert hearing.counts["clips_given_up"] == 1


async def test_a_clip_that_failed_while_the_user_spoke_fails_its_turn(hearing, recogniser):
    """Otherwise the turn would be answered without the words, and without an error."""
    recogniser.fails = True
    for is_told in (False, True):
        with pytest.raises(StageFailedError, match="no model"):
            await hearing.as_text(said(clip(5)), is_told=is_told)
    assert (await hearing.as_text(said(clip(5)))).parts == (TextPart(""),)
    recogniser.fails = False
    assert (await hearing.as_text(said(clip(7)), is_told=False)).parts == (TextPart("7 samples"),)


async def test_a_long_transcription_does_not_delay_a_turn(hearing, recogniser):
    recogniser.gate.clear()
    transcript = asyncio.create_task(hearing.transcript_of(clip(500).pcm))
    await asyncio.sleep(0.05)
    held, recogniser.gate = recogniser.gate, threading.Event()
    recogniser.gate.set()
    assert (await hearing.as_text(said(clip(5)))).parts == (TextPart("5 samples"),)
    assert not transcript.done()
    held.set()
    assert await transcript == "500 samples"


async def test_a_turn_does_not_wait_for_the_transcript_of_its_own_clip(hearing, recogniser):
    recogniser.gate.clear()
    transcripts = [asyncio.create_task(hearing.transcript_of(clip(n).pcm)) for n in (500, 5)]
    await asyncio.sleep(0.05)
    held, recogniser.gate = recogniser.gate, threading.Event()
    recogniser.gate.set()
    assert (await hearing.as_text(said(clip(5)))).parts == (TextPart("5 samples"),)
    assert not any(task.done() for task in transcripts)
    held.set()
    assert await asyncio.gather(*transcripts) == ["500 samples", "5 samples"]


class FakeEars:
    fails = False

    def ids(self, pcm: np.ndarray) -> list[int]:
        if self.fails:
            raise RuntimeError("no model")
        return [100, *range(200, 200 + len(pcm)), 101]


class FakePrompt:
    @staticmethod
    def words(text: str) -> list[int]:
        return list(map(ord, text))


async def test_ids_take_the_place_of_the_audio_and_of_the_words_beside_it():
    hearing = IdHearing(FakeEars())
    item = await hearing.as_ids(said(clip(2), TextPart("ab")), FakePrompt())
    assert (item.parts, item.token_ids) == ((), (100, 200, 201, 101, 97, 98))
    text = said(TextPart("hello"))
    assert await hearing.as_ids(text, FakePrompt()) is text
    assert hearing.counts["clips_recognised"] == 1


async def test_a_clip_whose_failure_was_told_is_nothing_the_next_time():
    ears = FakeEars()
    hearing, ears.fails = IdHearing(ears), True
    with pytest.raises(StageFailedError):
        await hearing.as_ids(said(clip(2)), FakePrompt())
    assert (await hearing.as_ids(said(clip(2)), FakePrompt())).token_ids == ()
