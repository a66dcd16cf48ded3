"""Words on their way between frames, and the passages of a response, spoken as they grow."""

import asyncio

import pytest

from sglang_live.messages import TalkerInput
from sglang_live.models.piece_talker import FrameTalker
from sglang_live.models.speech_lm.mixing import MixedVoice, Ratio
from sglang_live.speakable.style import SpeechStyle
from sglang_live.stages.talker.mixed_text import MixedText
from sglang_live.stages.talker.piece_speech import (
    LEAST_WORDS,
    MOST_WORDS,
    PieceSpeech,
    SpokenPiece,
)
from test.unit.stages.talker.test_piece_speech import Clock

TASK, AGAIN = 900, 901


def voice(n_words: int = 3, n_codes: int = 8) -> MixedVoice:
    return MixedVoice(
        ratio=Ratio(n_text=2, n_codes=5),
        head=[800],
        words=range(100, 100 + n_words),
        codes=range(n_codes),
        task_id=TASK,
        again_id=AGAIN,
    )


def test_a_prompt_mixes_the_recording_with_its_words_and_those_of_the_text():
    mixed = voice()
    assert (mixed.n_prompt, mixed.n_least, mixed.block) == (4, 4, 3)
    ids = mixed.prompt([100, 101, 102, 500, 501])
    assert ids == [800, 100, 101, 0, 1, 2, 3, 4, 102, 500, 5, 6, 7]


@pytest.mark.parametrize(("n_codes", "counts"), [(0, (2, 2, 0)), (5, (2, 4, 0)), (6, (4, 4, 1))])
def test_behind_a_whole_block_of_the_recording_a_group_is_next(n_codes, counts):
    mixed = voice(0, n_codes)
    assert (mixed.n_prompt, mixed.n_least, mixed.block) == counts


@pytest.mark.parametrize("sizes", [[9], [1] * 9, [4, 0, 5], [2, 2, 2, 3]])
@pytest.mark.parametrize("n_late", [0, 3])
def test_groups_do_not_depend_on_when_words_come(sizes, n_late):
    """n_late: parts that come before the engine takes any."""
    text, passed, words = MixedText(voice()), [], list(range(500, 509))
    for n, size in enumerate(sizes):
        if n == n_late:
            text.pass_to(lambda ids, done: passed.append((ids, done)))
        text.add([words.pop(0) for _ in range(size)])
    text.end()
    if n_late >= len(sizes):
        text.pass_to(lambda ids, done: passed.append((ids, done)))
    assert text.prompt()[:3] == [800, 100, 101]
    assert [done for _, done in passed] == [False] * (len(passed) - 1) + [True]
    groups = [501, -503, 503, -505, 505, -507, 507, -509]
    assert [i for ids, _ in passed for i in ids] == [*groups, AGAIN, -1 - TASK]


def test_the_last_group_has_what_is_left():
    text, passed = MixedText(voice()), []
    text.add(list(range(500, 504)))
    text.pass_to(lambda ids, done: passed.append((ids, done)))
    text.end()
    assert passed == [([501, -503], False), ([AGAIN, 503, -1 - TASK], True)]


async def test_a_text_that_ends_before_the_prompt_has_its_words_is_not_mixed():
    text = MixedText(voice(0))
    waiting = asyncio.create_task(text.can_be_mixed())
    text.add([500, 501, 502])
    await asyncio.sleep(0)
    assert not waiting.done()
    text.end()
    assert not await waiting
    enough = MixedText(voice(0))
    enough.add([500, 501, 502, 503])
    assert await enough.can_be_mixed() and not enough.is_complete
    waiting = asyncio.create_task(enough.complete())
    await asyncio.sleep(0)
    assert not waiting.done()
    enough.end()
    await waiting


# --- passages ---


class Model(FrameTalker):
    style, frame_s = SpeechStyle(), 0.1

    def prompt(self, voice, text): ...

    def engine_args(self, cache_dir, n_rows): ...

    def words(self, text: str) -> list[int]:
        return [ord(char) for char in text]


def part(text: str, n_tokens: int, done: bool = False) -> TalkerInput:
    return TalkerInput("job", [], done, text, n_tokens)


@pytest.fixture
def speech() -> PieceSpeech:
    return PieceSpeech(Model(), Clock(), voice())


TEXT = (
    "Good morning to you. There is some news for you. It has been cold for a week. Soon it will be "
    "warm again. That is all of it. Bye."
)


async def passages(speech: PieceSpeech) -> list[SpokenPiece]:
    found = []
    while (piece := await speech.next()) is not None:
        found.append(piece)
    return found


async def test_behind_the_first_piece_sentences_are_one_passage_up_to_its_bound(speech):
    speech.add(part(TEXT, 40, done=True))
    first, *others = await passages(speech)
    assert first.spoken == "Good morning to you." and first.mixed is None
    assert " ".join(piece.spoken for piece in [first, *others]) == TEXT
    for piece in others:
        assert piece.mixed.is_complete and piece.mixed.n_words == len(piece.spoken)
    assert [len(piece.spoken) >= LEAST_WORDS for piece in others] == [True, False]


async def test_a_passage_is_there_before_it_is_complete_and_its_words_keep_their_places(speech):
    speech.add(part("Good morning to you. There is some news for you. It ", 13))
    await speech.next()
    passage = await speech.next()
    assert passage.spoken == "There is some news for you." and not passage.mixed.is_complete
    assert speech.spoken(passage, 8) == [(7, pytest.approx(0.625))]
    n_before = passage.most_frames
    speech.add(part("has been cold for a week.", 20, done=True))
    assert passage.spoken.endswith("for you. It has been cold for a week.")
    assert passage.mixed.is_complete and passage.most_frames > n_before
    marks = speech.end(passage)
    assert [n for n, _ in marks][-1] == 20 and len(marks) == 13
    assert [n for n, _ in marks] == sorted(n for n, _ in marks)


async def test_a_text_without_sentences_ends_its_passage_at_the_higher_bound(speech):
    speech.add(part("so it goes on " * 40, 160, done=True))
    _, *others = await passages(speech)
    for piece in others[:-1]:
        assert MOST_WORDS <= piece.mixed.n_words <= MOST_WORDS + 81


def test_steps_that_took_text_are_not_decoded_but_count_as_steps_of_the_engine(speech):
    piece = SpokenPiece()
    kept = speech.audible(piece, [[4], [-3], [-2], [-2], [5]])
    assert kept == [[4], [5]] and speech._dropped_s == pytest.approx(0.3)
