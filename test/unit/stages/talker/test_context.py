"""A talker reads the newest messages: those that fit, and those that continue its last prompt."""

import pytest

from sglang_live.stages.talker.segments import first_kept, n_left_out


@pytest.mark.parametrize(
    ("lengths", "unread"),
    [
        ([], 0),
        ([60], 0),
        ([78], 0),
        ([79], 1),
        ([40, 38], 0),
        ([40, 39], 1),
        ([1, 79, 1], 2),
        ([79, 79, 10, 10], 2),
        ([10] * 100, 93),
        ([500], 1),
    ],
)
def test_the_oldest_messages_are_left_out_until_the_rest_fits(lengths, unread):
    assert n_left_out(lengths, prefix_tokens=10, most_tokens=100) == unread


KEYS = ["a", "b", "c", "d"]


def test_a_prompt_begins_with_the_message_of_the_one_before():
    assert first_kept(KEYS, [10] * 4, None) == 0
    assert first_kept(KEYS, [10] * 4, "a") == 0
    assert first_kept(KEYS, [10] * 4, "c") == 2


@pytest.mark.parametrize(
    ("lengths", "first"),
    [([10, 10, 10, 10], 2), ([10, 10, 10, 31], 3), ([1, 1, 1, 90], 3), ([90, 1, 1, 1], 1)],
)
def test_when_that_message_is_dropped_half_of_the_rest_is_left_out_too(lengths, first):
    assert first_kept(KEYS, lengths, "dropped") == first


def test_the_newest_message_is_always_read():
    assert first_kept(["a"], [500], "dropped") == 0
    assert first_kept([], [], "dropped") == 0


def tokens_computed(window: int, turns: int, *, halves: bool) -> tuple[int, int]:
    """Tokens of messages that a conversation's prompts compute, and the least that one contains,
    once the window is full. A message of 20 tokens a turn."""
    computed, least, began_with, before = 0, window, None, []
    for turn in range(turns):
        keys = [str(n) for n in range(max(0, turn + 1 - window // 20), turn + 1)]
        first = first_kept(keys, [20] * len(keys), began_with) if halves else 0
        read = keys[first:]
        is_continued = bool(before) and read[: len(before)] == before
        computed += 20 * (len(read) - len(before) if is_continued else len(read))
        if turn >= window // 20:
            least = min(least, 20 * len(read))
        before, began_with = read, read[0]
    return computed, least


def test_a_full_window_costs_an_eighth_part_of_what_it_costs_without_halving():
    whole, _ = tokens_computed(1000, 500, halves=False)
    halved, least = tokens_computed(1000, 500, halves=True)
    assert halved < whole / 8
    assert least == 500
