"""Pieces of a response in order, when their words end, and the listener's progress in each."""

import numpy as np
import pytest

from sglang_live.messages import Heard, TalkerInput
from sglang_live.models.cosyvoice.family import VERSIONS
from sglang_live.models.piece_talker import PieceTalker
from sglang_live.speakable.style import SpeechStyle
from sglang_live.stages.talker.piece_speech import PieceSpeech

FRAME_S = 0.1


class Model(PieceTalker):
    style, frame_s = SpeechStyle(), FRAME_S

    def prompt(self, voice, text): ...


class Clock:
    now = 0.0

    def now_s(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def speech(clock) -> PieceSpeech:
    return PieceSpeech(Model(), clock)


def part(text: str, n_tokens: int, done: bool = False) -> TalkerInput:
    return TalkerInput("job", [], done, text, n_tokens)


async def test_pieces_come_in_order_and_silent_ones_are_left_out(speech):
    speech.add(part("Good morning to you.\n", 4))
    speech.add(part("😀 😀\n\nAnd good night.", 12, done=True))
    assert (await speech.next()).spoken == "Good morning to you."
    assert (await speech.next()).spoken == "And good night."
    assert await speech.next() is None


async def test_a_text_of_which_nothing_is_said_has_no_piece(speech):
    speech.add(part("😀 😀\n", 5))
    speech.add(part("", 6, done=True))
    assert await speech.next() is None


async def test_the_words_of_a_piece_share_its_sound(speech):
    speech.add(part("One two three four. ", 8, done=True))
    piece = await speech.next()
    assert speech.spoken(piece, 38) and speech.n_frames == 38
    characters = len("One two three four.")
    # 3.8 s for 19 characters; the tokens are spread over the text.
    assert speech.end(piece) == [
        (2, pytest.approx(3.8 * 3 / characters)),
        (3, pytest.approx(3.8 * 7 / characters)),
        (6, pytest.approx(3.8 * 13 / characters)),
        (8, pytest.approx(3.8)),
    ]


async def test_until_a_piece_has_ended_its_words_are_expected_late(speech):
    speech.add(part("One two three four. ", 8, done=True))
    piece = await speech.next()
    # Slow speech: 0.125 s a character.
    assert speech.spoken(piece, 3) == []
    assert speech.spoken(piece, 1) == [(2, pytest.approx(0.375))]
    assert speech.spoken(piece, 1) == []
    assert [n for n, _ in speech.spoken(piece, 100)] == [3, 6, 8]


async def test_a_piece_begins_where_the_one_before_it_ended(speech):
    speech.add(part("Good morning to you. Good night.", 8, done=True))
    first = await speech.next()
    speech.spoken(first, 10)
    assert speech.end(first)[-1] == (5, pytest.approx(1.0))
    second = await speech.next()
    # As fast as the first, with some caution.
    begun = speech.spoken(second, 5)
    assert begun[0] == (7, pytest.approx(1.0 + 4 * 1.25 * 1.0 / 20))
    speech.spoken(second, 5)
    assert speech.end(second)[-1] == (8, pytest.approx(2.0))


async def test_progress_is_behind_the_begin_of_a_piece_while_those_before_it_are_heard(
    speech, clock
):
    assert speech.heard_of_request() is None
    speech.add(part("Good morning to you. Good night.", 8, done=True))
    speech.note_heard(Heard("job", 0.4, True))
    clock.now = 0.5
    assert speech.heard_of_request() == Heard("job", pytest.approx(0.9), True)
    first = await speech.next()
    speech.spoken(first, 30)
    speech.end(first)
    assert speech.heard_of_request().heard_s == pytest.approx(0.9 - 3.0)
    speech.note_heard(Heard("job", 2.0, False))
    clock.now = 9.0
    assert speech.heard_of_request() == Heard("job", pytest.approx(-1.0), False)


async def test_a_piece_is_bounded_by_its_length(speech):
    speech.add(part("Good morning to you. ", 8, done=True))
    assert (await speech.next()).most_frames == round((4.0 + 0.375 * 20) / FRAME_S)


async def test_letters_without_a_sound_are_counted(speech):
    speech.add(part("Go \u6cb3 home.", 4, done=True))
    assert (await speech.next()).spoken == "Go home."
    assert speech.n_unspeakable == 1


# --- silence ---


def as_published(codes: list[int], silent_codes: frozenset[int]) -> list[int]:
    """The rule of llm_job in FunAudioLLM/CosyVoice, restated."""
    kept, n_silent = [], 0
    for code in codes:
        n_silent = n_silent + 1 if code in silent_codes else 0
        if n_silent <= 5:
            kept.append(code)
    return kept


def silent_speech(clock) -> PieceSpeech:
    model = Model()
    model.silent_codes = VERSIONS["cosyvoice3.yaml"].silent_codes
    return PieceSpeech(model, clock)


@pytest.mark.parametrize("seed", range(20))
async def test_silence_that_lasts_is_dropped_as_in_the_reference(clock, seed):
    rng = np.random.default_rng(seed)
    speech = silent_speech(clock)
    silent_codes = sorted(speech._model.silent_codes)
    assert silent_codes == [1, 2, 28, 29, 55, 248, 494, 2241, 2242, 2322, 2323]
    codes = rng.choice([*silent_codes, 0, 3, 6560], 200).tolist()
    speech.add(part("One.", 2, done=True))
    piece, kept = await speech.next(), []
    for chunk in np.split(np.array(codes), sorted(rng.integers(0, 200, 30))):
        kept += speech.audible(piece, [[int(code)] for code in chunk])
    wanted = as_published(codes, frozenset(silent_codes))
    assert [code for [code] in kept] == wanted and 0 < len(wanted) < len(codes)


async def test_a_version_without_such_codes_keeps_all_silence(speech):
    assert VERSIONS["cosyvoice2.yaml"].silent_codes == frozenset()
    speech.add(part("One.", 2, done=True))
    frames = [[1]] * 30
    assert speech.audible(await speech.next(), frames) == frames


async def test_an_engine_learns_that_dropped_silence_was_heard(clock):
    """Else it would seem farther ahead of its listener than the decoder's codes reach."""
    speech = silent_speech(clock)
    speech.add(part("One. Two.", 4, done=True))
    piece = await speech.next()
    speech.note_heard(Heard("job", 0.5, advancing=False))
    speech.spoken(piece, len(speech.audible(piece, [[1]] * 25)))
    assert speech.heard_of_request().heard_s == pytest.approx(0.5 + 20 * FRAME_S)
    speech.end(piece)
    assert speech.heard_of_request().heard_s == pytest.approx(0.5 - 5 * FRAME_S)
