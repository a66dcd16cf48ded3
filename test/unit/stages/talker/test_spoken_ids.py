"""What a talker that reads text is given of a response."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_live.messages import TalkerInput
from sglang_live.models.demo.build import build_tokenizer
from sglang_live.models.family import TextReader
from sglang_live.speakable.style import SpeechStyle
from sglang_live.stages.talker.response import SpokenIds

TEXT = (
    "Well, here it is. **The river** runs past 3 old bridges \U0001f600, and on to the sea; "
    "`rm -rf` is not said by\n\n```sh\nrm -rf /\n```\n\nthe children who sit there all day "
    "without a word and wait for the boats that come up with the tide in the evening. Why not?"
)


@pytest.fixture(scope="module")
def encode():
    tokenizer = build_tokenizer(1024)
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def spoken(encode, parts: list[str], style: SpeechStyle | None = None) -> list[list[int]]:
    """The ids that each part gave, those of the end last."""
    text = SpokenIds(TextReader(encode, style or SpeechStyle()))
    ids = [text.add(TalkerInput("job", [], text=part)) for part in parts]
    return [*ids, text.add(TalkerInput("job", [], done=True))]


def words(encode, ids: list[list[int]]) -> str:
    return build_tokenizer(1024).decode([token for part in ids for token in part])


def test_markup_code_and_emoji_do_not_reach_the_talker(encode):
    heard = words(encode, spoken(encode, [TEXT]))
    assert "The river runs past three old bridges" in heard
    assert not set("*`#\n\U0001f600") & set(heard)
    assert "rm" not in heard.split("children")[0].split("said")[1]


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_the_ids_are_those_of_the_whole_spoken_ids(encode, cuts):
    parts, rest = [], TEXT
    while rest:
        n = cuts[len(parts) % len(cuts)]
        parts, rest = [*parts, rest[:n]], rest[n:]
    ids = spoken(encode, parts)
    assert [t for part in ids for t in part] == encode(words(encode, ids))
    assert ids != [[] for _ in ids]


def test_words_come_before_their_sentence_is_complete(encode):
    """A talker reads a token per frame: it must not run dry within a long sentence."""
    rng = random.Random(0)
    text = " ".join(rng.choice(("tide", "boats", "river", "evening")) for _ in range(200))
    ids = spoken(encode, list(text))
    longest = waiting = 0
    for part in ids[:-1]:
        waiting = 0 if part else waiting + 1
        longest = max(longest, waiting)
    assert longest < 130


def test_letters_that_it_cannot_speak_are_counted(encode):
    text = SpokenIds(TextReader(encode, SpeechStyle()))
    assert text.add(TalkerInput("job", [], text="\u6cb3", done=True)) == []
    assert text.n_unspeakable == 1
    both = SpeechStyle(scripts=frozenset(("LATIN", "CJK")))
    assert spoken(encode, ["\u6cb3"], both)[-1]
