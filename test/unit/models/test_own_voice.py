"""Ids of a response that a thinker speaks itself: its text comes with the codes that say it."""

from dataclasses import replace

import numpy as np
import pytest

from sglang_live.models.own_voice import OwnVoice, SpokenIds

VOICE = OwnVoice(first_id=100, n_codes=50, frame_s=0.04, chunk_frames=2, frames_per_token=2.0)


@pytest.fixture
def spoken() -> SpokenIds:
    return SpokenIds(VOICE, lambda ids: "".join(chr(token) for token in ids))


def ids(text: str, *codes: int) -> list[int]:
    return [*map(ord, text), *(100 + code for code in codes)]


def test_text_is_said_by_the_codes_behind_it(spoken):
    response = ids("AB", 1, 2, 3, 4) + ids("CD", 5, 6, 7, 8)
    said = [spoken.text(response[:n], ended=False) for n in range(len(response) + 1)]
    assert said == ["", "", "", "", "A", "A", "AB", "AB", "AB", "AB", "ABC", "ABC", "ABCD"]
    assert spoken.n_text == 4


def test_a_stretch_that_ends_early_is_said(spoken):
    assert spoken.text(ids("ABC", 1, 2), ended=False) == "A"
    assert spoken.text(ids("ABC", 1, 2) + ids("D"), ended=False) == "ABC"
    assert spoken.text(ids("ABC", 1, 2) + ids("DE"), ended=True) == "ABCDE"


def test_more_codes_than_the_text_takes_say_it_once(spoken):
    assert spoken.text(ids("A", 1, 2, 3, 4, 5, 6), ended=False) == "A"


def test_frames_are_taken_once_with_the_number_of_ids_up_to_each(spoken):
    response = ids("AB", 0, 49) + ids("C", 7)
    spoken.text(response[:3], ended=False)
    assert spoken.take_frames() == (np.array([0], "<i2").tobytes(), [(3, 0.04)])
    spoken.text(response, ended=True)
    codes, marks = spoken.take_frames()
    assert np.frombuffer(codes, "<i2").tolist() == [49, 7]
    assert marks == [(4, pytest.approx(0.08)), (6, pytest.approx(0.12))]
    assert spoken.take_frames() == (b"", [])


def test_a_chunk_takes_the_steps_of_its_text_too():
    assert VOICE.chunk_steps == 2 + 1
    assert replace(VOICE, chunk_frames=25).chunk_steps == 25 + 13


def test_ids_beside_the_codes_are_text(spoken):
    spoken.text([99, 100, 149, 150], ended=True)
    assert (spoken.n_text, spoken.codes) == (2, [0, 49])
