"""The demo model's world: every question has one answer, and memory is a user's own."""

import random
from itertools import islice

import pytest

from training.demo import world
from training.demo.unknown_sentences import unknown_sentences


def test_no_question_has_two_answers():
    ways = [way for ways, _ in (*world.FACTS, *world.LONG) for way in ways]
    assert len(ways) == len(set(ways))
    said = world.questions()
    assert len(said) == len(set(said))


def test_questions_are_plain_words():
    for question in world.questions():
        assert question == question.lower().strip()
        assert question.replace(" ", "").isalpha(), question


def test_answers_are_sentences_of_their_own():
    said = world.answers()
    assert len(said) == len(set(said))
    assert all(answer[0].isupper() and answer[-1] in ".?!" for answer in said)


def test_unknown_sentences_are_no_questions_of_this_world():
    known = set(world.questions())
    met = list(islice(unknown_sentences(random.Random(1)), 2000))
    assert not known & set(met)
    assert len(set(met)) > 1500
    assert all("{" not in sentence and 2 <= len(sentence.split()) <= 14 for sentence in met)


@pytest.mark.parametrize(
    ("n", "word"), [(1, "one"), (20, "twenty"), (21, "twenty one"), (50, "fifty")]
)
def test_numbers_have_words(n, word):
    assert world.number_word(n) == word


@pytest.mark.parametrize("n", [0, 60])
def test_other_numbers_are_not_of_this_world(n):
    with pytest.raises(ValueError, match=str(n)):
        world.number_word(n)


def test_memory_is_what_was_told_last():
    rng, memory = random.Random(1), world.Memory()
    assert "not told" in memory.ask_name(rng).answer
    assert "not told" in memory.ask_number(rng).answer
    memory.tell_name(rng, "Anna")
    assert "Anna" in memory.tell_name(rng, "Anna").answer
    memory.tell_name(rng, "Peter")
    memory.tell_number(rng, 17)
    assert memory.ask_name(rng).answer.startswith("Peter")
    assert memory.ask_number(rng).answer.startswith("Seventeen")


def test_users_ask_every_kind_of_question_and_get_the_answers_of_the_world():
    rng = random.Random(1)
    answers = set(world.answers())
    heard = {world.User(rng, unknown_sentences(rng)).next().answer for _ in range(3000)}
    assert heard <= answers
    fixed = {answer for _, answer in (*world.FACTS, *world.LONG)} | {world.UNKNOWN}
    assert fixed <= heard
