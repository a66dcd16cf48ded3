"""The model's history of an assistant item that was not heard to its end."""

import time

import pytest

from sglang_live.core import TextPart
from sglang_live.gateway.audio.codec import PCM
from sglang_live.gateway.call.conversation import assistant_item
from sglang_live.gateway.call.conversation.assistant_item import AssistantItem, truncate_at_word
from test.unit.gateway.fakes import done, history_item_of

WORDS = "one two three four five six seven eight nine ten"
FRAME_BYTES = PCM.n_bytes(80)


def item_of(n_frames=40, *, words=WORDS, n_sent=None, marked=True) -> AssistantItem:
    """An item of one token per word and n_frames of audio."""
    item = AssistantItem("item", "audio", frames_per_token=4.0)
    for n, word in enumerate(words.split(" ")):
        item.add_text(word if n == 0 else " " + word, n + 1 if marked else 0)
    item.made_bytes = n_frames * FRAME_BYTES
    item.audio_sent(bytes((n_frames if n_sent is None else n_sent) * FRAME_BYTES))
    return item


def completed(n_frames=40, **fields) -> AssistantItem:
    item = item_of(n_frames, **fields)
    item.set_end(done(item=history_item_of(WORDS), n_frames=n_frames))
    item.close("completed")
    return item


def interrupted(heard_ms, *, n_frames=20, end=None, **fields) -> AssistantItem:
    item = item_of(n_frames, **fields)
    item.close("incomplete", stopped=True)
    if heard_ms is not None:
        item.end_playback(heard_ms)
    if end:
        item.set_end(end)
    return item


def end_of(words=WORDS, **fields):
    fields = {"n_frames": 25, "spoken": False, **fields}
    return done(status="interrupted", item=history_item_of(words), **fields)


def test_a_complete_item_is_the_sessions_own_history_item():
    item = completed()
    assert item.history().key == "reply:" + WORDS
    assert item.visible_text == WORDS


@pytest.mark.parametrize("cut", ["end_playback", "truncate"])
def test_a_truncation_keeps_the_first_tokens_and_their_text_under_a_new_key(cut):
    item = completed()
    getattr(item, cut)(1600)
    heard = item.history()
    assert heard.token_ids == (1, 2, 3, 4, 5)
    assert heard.parts == (TextPart("one two three four five"),)
    assert heard.key != "reply:" + WORDS
    assert item.visible_text == "one two three four five"


def test_an_equal_truncation_keeps_the_key():
    item = completed()
    item.truncate(1600)
    key = item.history().key
    item.truncate(1610)
    item.end_playback(500.0)
    assert item.history().key == key


def test_the_clients_truncation_overrides_the_playback_clock_in_both_directions():
    item = completed()
    item.end_playback(800.0)
    item.truncate(1600)
    assert len(item.history().token_ids) == 5
    other = completed()
    other.end_playback(1600.0)
    other.truncate(800)
    assert len(other.history().token_ids) == 2
    assert not other.end_playback(3000.0)
    assert len(other.history().token_ids) == 2


def test_a_client_that_heard_everything_restores_the_whole_item():
    item = completed()
    item.end_playback(800.0)
    item.truncate(3200)
    assert item.history().key == "reply:" + WORDS


def test_a_rounded_sum_of_all_packets_is_the_whole_item():
    item = completed()
    assert not item.end_playback(sum([80.0] * 40) - 1e-9)
    assert item.history().key == "reply:" + WORDS


def test_an_item_of_which_nothing_was_heard_has_no_history():
    item = completed()
    item.truncate(0)
    assert item.history() is None
    assert item.visible_text == ""


def test_an_interrupted_item_gets_its_tokens_at_the_end_of_the_turn_and_uses_the_sessions_pace():
    item = interrupted(800.0)
    # Before the end of the turn only the text is known.
    assert item.history().token_ids is None
    item.set_end(end_of())
    assert item.history().token_ids == (1, 2)
    assert item.history().parts == (TextPart("one two"),)


def test_tokens_of_an_interrupted_item_with_complete_audio_are_spread_over_it():
    item = interrupted(800.0, end=end_of(n_frames=20, spoken=True))
    assert item.history().token_ids == (1, 2, 3, 4, 5)


def test_tokens_that_were_generated_but_not_sent_as_text_do_not_count():
    end = end_of(WORDS + " eleven twelve")
    item = interrupted(1600.0, end=end)
    assert item.history().token_ids == (1, 2, 3, 4, 5)


def test_sent_audio_of_a_cancelled_item_counts_until_the_client_truncates_it():
    item = interrupted(None, n_sent=8, end=end_of())
    assert item.history().token_ids == (1, 2)
    item.audio_sent(bytes(4 * FRAME_BYTES))  # was on its way
    item.truncate(320)
    assert item.history().token_ids == (1,)


def test_sent_text_of_a_cancelled_text_item_counts():
    item = AssistantItem("item", "text")
    item.add_text("one two", 2)
    item.close("incomplete", stopped=True)
    item.set_end(end_of())
    assert item.history().token_ids == (1, 2)
    assert item.history().parts == (TextPart("one two"),)


def test_without_tokens_the_text_is_truncated_in_proportion_at_a_word():
    item = interrupted(800.0)
    assert item.history().parts == (TextPart("one two three four five"),)
    failed = item_of()
    failed.close("incomplete")
    assert failed.history().parts == (TextPart(WORDS),)
    unmarked = completed(marked=False)
    unmarked.truncate(1600)
    assert unmarked.history().token_ids is None
    assert unmarked.history().parts == (TextPart("one two three four five"),)


def test_text_ends_with_the_last_whole_character_of_the_tokens():
    item = AssistantItem("item", "audio")
    item.add_text("a", 1)
    item.add_text("é", 3)  # two tokens
    item.made_bytes = 10 * FRAME_BYTES
    item.audio_sent(bytes(10 * FRAME_BYTES))
    item.set_end(done(item=history_item_of("x y z"), n_frames=10))
    item.close("completed")
    item.truncate(560)
    assert item.history().token_ids == (1, 2)
    assert item.history().parts == (TextPart("a"),)


def test_tokens_without_text_are_kept():
    item = item_of(10, words="one")
    item.marks = [(3, 3)]
    item.set_end(done(item=history_item_of("x y z"), n_frames=10))
    item.close("completed")
    item.truncate(300)
    assert (item.history().parts, item.history().token_ids) == ((), (1,))


def test_end_playback_returns_whether_the_item_becomes_shorter():
    item = completed()
    assert item.end_playback(800.0)
    assert not item.end_playback(800.0)
    assert not completed().end_playback(3200.0)


@pytest.mark.parametrize(
    ("whole", "ratio", "cut"),
    [
        ("One two three", 0.0, ""),
        ("One two three", 0.5, "One"),
        ("One two three", 0.54, "One two"),
        ("One two three", 1.0, "One two three"),
        ("  lead", 0.5, ""),
        ("今日はいい天気", 0.5, "今日は"),
        ("Antidisestablishmentarianism", 0.9, ""),
    ],
)
def test_text_is_truncated_between_words(whole, ratio, cut):
    assert truncate_at_word(whole, ratio) == cut


def test_text_that_ends_in_blanks_is_truncated_in_linear_time():
    began_s = time.process_time()
    assert assistant_item.truncate_at_word("Well." + " " * 50_000, 1.0) == "Well."
    # Quadratic time would be about 40 s.
    assert time.process_time() - began_s < 2


def test_a_voice_that_tells_when_words_end_decides_what_was_heard():
    item = item_of(n_frames=40)
    # The first words are slow: spread evenly, five of ten tokens would be heard after 1600 ms.
    item.add_spoken([(1, 0.7), (2, 1.5), (3, 1.7)])
    item.add_spoken([(10, 3.2)])
    item.set_end(done(item=history_item_of(WORDS), n_frames=40))
    item.close("completed")
    item.truncate(1600)
    assert item.history().token_ids == (1, 2)
    assert item.visible_text == "one two"
    item.truncate(1500)  # the very end of the second word
    assert item.history().token_ids == (1, 2)
    item.truncate(600)
    assert item.history() is None and item.visible_text == ""


def test_words_that_were_read_but_not_sent_were_not_heard():
    item = item_of(n_frames=40, n_sent=20)
    item.add_spoken([(4, 1.2), (9, 3.0)])
    item.close("incomplete", stopped=True)
    item.set_end(end_of())
    assert item.history().token_ids == (1, 2, 3, 4)
