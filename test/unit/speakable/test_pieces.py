"""Pieces of a growing text: complete, in order, and the same however the text arrives."""

import sys
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_live.speakable.pieces import Limits, Piece, Pieces
from sglang_live.speakable.style import SpeechStyle

# Text that has what matters to the cutting more often than random characters have it.
FRAGMENTS = st.sampled_from(
    ["Hello", "a", " ", "  ", "\n", "\n\n", ". ", ", ", "! ", "? ", "... ", "Dr. ", "e.g. ",
     "U.S. ", "3.14", "10:30 ", "https://a.b/c ", "- ", "1. ", "# ", "> ", "|", "| a | b |\n",
     "```", "(", "```py\n", "`", "``", "**", "—", "。", "你好", "x" * 90, "May 6, ", ") ", "[a](",
     "2024 ", "😀", "~~~\n", "and the word goes on to the next ", "\t", "\u0301", "\x00", "9" * 40]
)  # fmt: skip
CODE, TABLE = "The code is in the text.", "The table is in the text."
TEXTS = st.one_of(
    st.text(max_size=400),
    st.lists(FRAGMENTS, max_size=120).map("".join),
)


def pieces_of(*parts: str, **options) -> list[Piece]:
    pieces = Pieces(**options)
    return [piece for part in parts for piece in pieces.add(part)] + pieces.end()


def spoken(*parts: str, **options) -> list[str]:
    return [piece.spoken for piece in pieces_of(*parts, **options)]


def completed_at(text: str) -> list[tuple[int, Piece]]:
    """Each piece with the number of characters after which it is complete."""
    pieces = Pieces()
    done = [(at + 1, piece) for at, char in enumerate(text) for piece in pieces.add(char)]
    return done + [(len(text), piece) for piece in pieces.end()]


@given(TEXTS, st.lists(st.integers(0, 400), max_size=8))
@settings(max_examples=200, deadline=None)
@example("One, two, three. ```\nx\n``` Four", [3, 20, 21, 22])
def test_pieces_do_not_depend_on_how_the_text_arrives(text, places):
    bounds = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    parts = [text[a:b] for a, b in pairwise(bounds)]
    assert pieces_of(*parts) == pieces_of(text) == [piece for _, piece in completed_at(text)]


PLAIN_TEXTS = st.lists(
    st.sampled_from(
        ["we ", "The ", "I ", "a ", "Chapter ", "don't ", "five ", "May ", "p", "m", ".", ", ",
         "V ", "km ", "half ", "past ", "3 ", "2024 ", "(", ")", "'", "’s ", "\n", " ", "and ",
         "of ", "dot ", "com ", "Sinéad ", "при ", "St ", "No", "Dr", "th ", "-", "*", "`"]
    ),
    max_size=40,
).map("".join)  # fmt: skip


@given(st.one_of(PLAIN_TEXTS, TEXTS), st.integers(1, 7))
@settings(max_examples=400, deadline=None)
def test_a_piece_begins_with_its_beginning(text, n_words):
    pieces, found, done = Pieces(), [], []
    for char in text:
        done += pieces.add(char)
        if (beginning := pieces.beginning(n_words)) is not None:
            found.append(beginning)
    if not found:
        return
    whole = next(piece for piece in done + pieces.end() if piece.spoken)
    said = [word.rstrip(".,!?;:") for word in whole.spoken.split()]
    for beginning in found:
        words = [word.rstrip(",") for word in beginning.spoken.split()]
        assert len(words) == n_words and said[: n_words - 1] == words[:-1]
        assert len(said) >= n_words - 1 and beginning.source_begin == whole.source_begin


def test_the_beginning_is_known_before_the_piece_is():
    pieces = Pieces()
    assert pieces.add("The main reason for ") == [] and pieces.beginning(5) is None
    assert pieces.add("that ") == []
    assert pieces.beginning(5) == Piece("The main reason for that", 0, 24)
    [first] = pieces.add("is simple, and ")
    assert first.spoken == "The main reason for that is simple,"
    assert pieces.beginning(5) is None


@pytest.mark.parametrize(
    "text",
    [
        "It costs 3 dollars or more ",  # a figure may go on
        "See Chapter I of this book ",  # a numeral
        "In the U.S. we have many ",
        "Ask NASA about what it knows ",
        "Чему равно число пи в этом ",  # the voice has no such letters
        "Use `a b c d e f ",
    ],
)
def test_words_that_may_be_said_otherwise_are_no_beginning(text):
    pieces = Pieces()
    assert pieces.add(text) == [] and pieces.beginning(5) is None


def test_a_beginning_has_no_more_words_than_its_piece():
    with pytest.raises(ValueError, match="fewer words than 8"):
        Pieces().beginning(8)


@given(TEXTS, st.lists(st.integers(0, 400), max_size=8))
@settings(max_examples=100, deadline=None)
def test_each_add_returns_all_pieces_that_are_complete(text, places):
    pieces, so_far, found = Pieces(), 0, []
    for place in [*sorted(places), len(text)]:
        found += pieces.add(text[so_far : max(place, so_far)])
        so_far = max(place, so_far)
        grown = Pieces()
        assert found == grown.add(text[:so_far])


@given(TEXTS)
@settings(max_examples=200, deadline=None)
def test_pieces_cover_the_text_without_gaps(text):
    pieces = pieces_of(text)
    bounds = [0, *(piece.source_end for piece in pieces)]
    assert [piece.source_begin for piece in pieces] == bounds[:-1]
    assert bounds[-1] == len(text)
    assert all(piece.source_begin < piece.source_end for piece in pieces)


@given(TEXTS)
@settings(max_examples=200, deadline=None)
def test_neither_a_piece_nor_its_words_are_longer_than_the_limit(text):
    limits = Limits(enough=20, much=50, longest=80)
    for piece in pieces_of(text, limits=limits):
        assert piece.source_end - piece.source_begin <= limits.longest
        assert len(piece.spoken) <= limits.longest


def test_figures_behind_a_word_without_end_are_divided_too():
    limits = Limits(enough=20, much=50, longest=80)
    pieces = pieces_of("x" * 80 + "x 101321121", limits=limits)
    assert all(len(piece.spoken) <= limits.longest for piece in pieces)
    assert sum(bool(piece.spoken) for piece in pieces) > 1


@pytest.mark.parametrize(
    "text", ["x" * 10_000, " " * 10_000, "9" * 10_000, "😀" * 10_000, "`" * 10_000, "|" * 10_000,
             "\n" * 10_000, "你" * 10_000, "a." * 5_000, "```\n" + "x" * 10_000, "[" * 10_000]
)  # fmt: skip
def test_no_text_waits_without_bound(text):
    longest = Limits().longest
    for at, piece in completed_at(text):
        assert at - piece.source_begin <= longest + 1


def lines_run(text: str) -> int:
    """Lines of this package that are executed for a text."""
    count = 0

    def on_line(_frame, event, _arg):
        nonlocal count
        count += event == "line"
        return on_line

    def on_call(frame, _event, _arg):
        return on_line if "speakable" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        pieces_of(text)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    "unit",
    ["x", " ", "a ", "a, ", "One two three. ", "`", "|a|\n", "- a\n", "```\n", "9", "é", "**"],
)
def test_work_grows_in_proportion_to_the_text(unit):
    n = 3000 // len(unit)
    assert lines_run(unit * 2 * n) < 2.3 * lines_run(unit * n)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("Sure, I can do that for you, and more. Really.", "Sure, I can do that for you,"),
        ("Yes. It is so. Next one.", "Yes. It is so."),
        ("Paris is the capital of France. It is large.", "Paris is the capital of France."),
        ("The value of pi is 3.14 or so. Good.", "The value of pi is three point one four or so."),
        ("Please ask Dr. Smith about it. Bye now.", "Please ask Doctor Smith about it."),
        ("It happened in the U.S. last year. Then not.", "It happened in the U S last year."),
        ("Well... I think so. Yes.", "Well, I think so."),
        ("We meet at 10:30 a.m. sharp. Be there.", "We meet at ten thirty A M sharp."),
        ("Look at https://a.b/c?d=1. It is good. Yes.", "Look at a dot b."),
        ("Born on May 6, 2024 in Rome. So.", "Born on May sixth, twenty twenty-four in Rome."),
        ("# A short title\n\nThen text. More.", "A short title."),
        ("1. Take the milk\n2. Drink it", "one. Take the milk."),
        ("一二三。Hello there my friend. Bye.", "Hello there my friend."),
        (
            "What might be if Allied powers had never quite begun World War II? Yes.",
            "What might be if Allied powers had never quite begun World War two?",
        ),
        ("He said no. Then he left.", "He said no."),
        ("See No. 5 and Fig. 3 there. Good.", "See number five and figure three there."),
        (
            "People can say how long this sentence of many words goes on without any mark",
            "People can say how long this sentence of many words goes",
        ),
    ],
)  # fmt: skip
def test_the_first_piece_is_short(text, first):
    assert next(words for words in spoken(text) if words) == first


def test_a_sentence_is_complete_with_what_follows_it():
    pieces = Pieces()
    assert pieces.add("This is a sentence.") == []
    assert pieces.add(" ") == []
    assert pieces.add("A") == [Piece("This is a sentence.", 0, 20)]
    assert pieces.end() == [Piece("A.", 20, 21)]


def test_later_pieces_hold_several_sentences():
    text = "One two three. " + "This is short. " * 10
    assert [len(words) for words in spoken(text)] == [14, 59, 59, 29]


def test_a_long_sentence_is_cut_at_a_clause():
    clause = "and this is a further clause of it, "
    long = spoken("One two three. It begins " + clause * 8 + "end.")
    assert all(words.endswith((",", ".")) for words in long)
    assert all(60 <= len(words) <= 200 for words in long[1:-1])


def test_a_heading_stays_a_sentence_before_a_long_one():
    text = "One two three. Short heading\n\n" + "Word " * 60 + "end."
    assert spoken(text)[1] == "Short heading."


def test_a_sentence_without_marks_is_cut_between_words():
    pieces = spoken("One two three. " + "word " * 200)
    assert " ".join(pieces).split() == ["One", "two", "three.", *["word"] * 199, "word."]
    assert all(len(words) <= 300 for words in pieces)


def test_code_and_tables_are_pieces_of_their_own():
    table = "| a | b |\n|---|---|\n"
    text = f"Look at this code:\n\n```python\nx = 1\n```\nAnd at a table:\n{table}That is all."
    pieces = pieces_of(text)
    assert [piece.spoken for piece in pieces] == [
        "Look at this code.", CODE, "And at a table.", TABLE, "", "That is all.",
    ]  # fmt: skip
    assert text[pieces[1].source_begin : pieces[1].source_end] == "```python\nx = 1\n```\n"


def test_of_blocks_that_follow_one_another_one_is_mentioned():
    text = "```\n" + "x = 1\n" * 100 + "```\n| a |\n| b |\nEnd\n| c |\n"
    assert [words for words in spoken(text) if words] == [CODE, TABLE, "End.", TABLE]


def test_a_voice_may_say_nothing_of_a_block():
    style = SpeechStyle(says_code="", says_table="")
    assert not any(spoken("```\nx = 1\n```\n| a |\n| b |\n", style=style))


@pytest.mark.parametrize("fence", ["```", "~~~", "````"])
def test_a_fence_ends_with_its_own_mark(fence):
    text = f"Begin of it.\n{fence}\n``\ncode. More code.\n~~\n{fence}\nThe end."
    assert [words for words in spoken(text) if words] == ["Begin of it.", CODE, "The end."]


def test_three_backticks_in_one_line_are_no_fence():
    assert [words for words in spoken("Begin of it.\n```x = 1```\nThe end.") if words] == [
        "Begin of it.", CODE, "The end.",
    ]  # fmt: skip


def test_a_link_may_lie_in_two_pieces():
    text = "You can [see this page, and the next](https://a.b/c,d.html) today. Then go on."
    assert spoken(text) == ["You can see this page,", "and the next today. Then go on."]


def test_code_in_a_list_is_not_spoken():
    text = "Do this first:\n\n1. ```sh\n   rm -rf x\n   ```\n2. Then that.\n"
    assert [words for words in spoken(text) if words] == [
        "Do this first.", "one.", CODE, "two. Then that.",
    ]  # fmt: skip


def test_code_that_does_not_end_is_not_spoken():
    assert [words for words in spoken("Here it is:\n```\nx. Y.") if words] == ["Here it is.", CODE]


def test_the_rest_of_a_word_without_end_is_not_spoken():
    assert [words for words in spoken("x" * 310 + " and more.") if words] == ["and more."]


def test_letters_that_the_voice_cannot_speak_are_counted():
    pieces = Pieces()
    pieces.add("The word Привет is Russian. ")
    pieces.end()
    assert pieces.n_unspeakable == 6


def test_nothing_follows_an_end():
    pieces = Pieces()
    assert pieces.end() == []
    with pytest.raises(ValueError, match="ended"):
        pieces.add("more")
    with pytest.raises(ValueError, match="ended"):
        pieces.end()


@pytest.mark.parametrize(
    "bad",
    [{"first_words": 0}, {"first_most": 2}, {"enough": 201}, {"much": 301}, {"enough": 0}],
)
def test_limits_that_contradict_each_other_are_refused(bad):
    with pytest.raises(ValueError, match=r"at least|positive"):
        Limits(**bad)
