"""Which tokens a session drops between its sink and its window."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_live.kv.retention import (
    Compaction,
    RetentionConfig,
    RetentionFlags,
    compaction_of,
    media_after,
    rebase_due,
)

PAGE = 16


def cut(n_tokens: int, **other) -> Compaction | None:
    facts = {"sink_tokens": 32, "window_tokens": 100, "page_size": PAGE, "owned_from": 0}
    return compaction_of(**{"n_tokens": n_tokens, "media": (), **facts, **other})


def test_what_lies_between_sink_and_window_goes():
    assert cut(32 + 64 + 100) == Compaction(32, 96)


def test_sink_and_window_get_the_rest_of_their_pages():
    assert cut(300, sink_tokens=33) == Compaction(
        48, 192
    )  # 300 - 100 = 200 lies in the page from 192


def test_short_sessions_stay_whole():
    assert cut(0) is None
    assert cut(132 + PAGE - 1) is None
    assert cut(132 + PAGE) == Compaction(32, 48)


def test_a_compaction_drops_at_least_the_slack():
    assert cut(32 + 96 + 100, slack_tokens=97) is None
    assert cut(32 + 96 + 100, slack_tokens=96) == Compaction(32, 128)


def test_media_at_the_window_stay_whole():
    assert cut(400, media=[(250, 310)]) == Compaction(32, 240)
    assert cut(400, media=[(230, 245), (250, 310)]) == Compaction(32, 224)


def test_media_at_the_sink_stay_whole():
    assert cut(400, media=[(20, 70)]) == Compaction(80, 288)


def test_media_that_touch_a_boundary_are_not_in_its_way():
    assert cut(400, media=[(16, 32), (32, 48), (272, 288), (288, 304)]) == Compaction(32, 288)


def test_media_without_a_page_boundary_between_them_are_one():
    spans = [(40 + 10 * i, 50 + 10 * i) for i in range(25)]  # 40 to 290
    assert cut(400, sink_tokens=48, media=spans) == Compaction(80, 240)
    close = [(33, 287), (289, 399)]  # 288 lies between: nothing but the gap can go
    assert cut(400, media=close) == Compaction(32, 288)
    assert cut(400, media=[(20, 290)]) is None


def test_the_windows_begin_must_be_behind_the_trees_part():
    assert cut(400, owned_from=289) is None
    assert cut(400, owned_from=288) == Compaction(32, 288)
    assert cut(400, owned_from=288, media=[(280, 300)]) is None


def test_media_move_with_the_tokens():
    spans = [(0, 10), (40, 60), (100, 120)]
    assert media_after(Compaction(32, 96), spans) == [(0, 10), (36, 56)]


@st.composite
def sessions(draw) -> dict:
    """Media in running text: at least a page of it between two items, and before the first."""
    page_size = draw(st.sampled_from((1, 4, 16)))
    at, media = draw(st.integers(page_size, 40)) + page_size, []
    for text, length in draw(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 90)))):
        begin = at + page_size + text
        at = begin + length
        media.append((begin, at))
    return {
        "n_tokens": at + draw(st.integers(0, 500)),
        "sink_tokens": draw(st.integers(0, page_size)),
        "window_tokens": draw(st.integers(1, 200)),
        "page_size": page_size,
        "owned_from": draw(st.integers(0, 40)),
        "media": media,
        "slack_tokens": draw(st.integers(1, 60)),
    }


@settings(max_examples=150)
@given(session=sessions())
def test_a_compaction_drops_whole_pages_and_whole_media_outside_sink_and_window(session):
    found = compaction_of(**session)
    if found is None:
        return
    assert found.begin % session["page_size"] == found.end % session["page_size"] == 0
    assert found.begin >= session["sink_tokens"]
    assert found.end <= session["n_tokens"] - session["window_tokens"]
    assert found.n_tokens >= session["slack_tokens"]
    for begin, end in session["media"]:
        assert not begin < found.begin < end
        assert not begin < found.end < end


@settings(max_examples=150)
@given(session=sessions())
def test_what_stays_is_bounded(session):
    found = compaction_of(**{**session, "owned_from": 0})
    longest = max((b - a for a, b in session["media"]), default=0)
    bound = session["sink_tokens"] + session["window_tokens"] + session["slack_tokens"] + longest
    left = session["n_tokens"] - (found.n_tokens if found else 0)
    # Pages begun at the sink, at the window, and where the boundary moved out of an item.
    assert left < bound + 3 * session["page_size"]


@settings(max_examples=150)
@given(session=sessions())
def test_a_second_compaction_at_once_drops_nothing(session):
    found = compaction_of(**session)
    if found is None:
        return
    after = {
        **session,
        "n_tokens": session["n_tokens"] - found.n_tokens,
        "media": media_after(found, session["media"]),
        "owned_from": min(session["owned_from"], found.begin),
        "slack_tokens": 1,
    }
    assert compaction_of(**after) is None


def test_positions_are_rebased_before_the_table_ends():
    due = {"limit": 1000, "reserve_tokens": 100}
    assert not rebase_due(500, 400, **due)
    assert rebase_due(501, 400, **due)


def test_a_session_without_an_offset_gains_nothing_by_a_rebase():
    assert not rebase_due(0, 990, 1000)


@pytest.mark.parametrize("bad", [{"sink_tokens": -1}, {"window_tokens": 0}, {"slack_tokens": 0}])
def test_bad_configs_are_refused(bad):
    with pytest.raises(ValueError):
        RetentionConfig(**bad)


# --- boundaries ---


def test_one_token_is_enough_for_a_compaction_without_slack():
    one = {"page_size": 1, "sink_tokens": 32}
    assert cut(133, **one) == Compaction(32, 33)
    assert cut(133, **one, slack_tokens=0) == Compaction(32, 33)
    assert cut(132, **one, slack_tokens=0) is None


def test_a_session_shorter_than_its_window_stays_whole_without_a_sink():
    assert cut(50, page_size=1, sink_tokens=0) is None
    assert cut(100, page_size=1, sink_tokens=0) is None
    assert cut(101, page_size=1, sink_tokens=0) == Compaction(0, 1)


def test_media_that_end_or_begin_at_the_gap_are_kept():
    spans = [(16, 32), (32, 96), (96, 110)]
    assert media_after(Compaction(32, 96), spans) == [(16, 32), (32, 46)]


def test_an_offset_of_one_can_be_rebased():
    assert rebase_due(1, 1000, 1000, reserve_tokens=0)
    assert not rebase_due(1, 999, 1000, reserve_tokens=0)


@pytest.mark.parametrize("edge", [{"sink_tokens": 0}, {"window_tokens": 1}, {"slack_tokens": 1}])
def test_configs_at_their_bounds_are_accepted(edge):
    assert RetentionConfig(**edge)


# --- bounds that suit a model ---


@given(st.integers(1, 200_000), st.integers(0, 200_000))
def test_sink_and_window_leave_a_quarter_to_the_turn_and_its_response(good_tokens, header):
    config = RetentionFlags().suited_to(good_tokens)
    kept = config.behind(header)
    assert kept.sink_tokens == header
    assert kept.window_tokens <= min(2048, max(1, good_tokens // 2))
    assert kept.window_tokens >= config.window_tokens // 4
    if header <= good_tokens // 2:  # otherwise a quarter of the window stays
        assert header + kept.window_tokens + kept.slack_tokens <= max(3, good_tokens * 3 // 4)


def test_a_model_of_any_context_from_4096_on_has_the_usual_window():
    for good_tokens in (4096, 1_000_000, None):
        kept = RetentionFlags().suited_to(good_tokens).behind(200)
        assert (kept.window_tokens, kept.slack_tokens) == (2048, 256)


def test_a_window_that_is_given_holds_for_any_model_and_header():
    kept = RetentionFlags(window_tokens=2000, slack_tokens=9).suited_to(600).behind(500)
    assert (kept.window_tokens, kept.slack_tokens, kept.sink_tokens) == (2000, 9, 500)
    assert (kept.within_tokens, kept.window_frames) == (None, None)


def test_a_short_training_shortens_no_speech():
    assert RetentionFlags().suited_to(600).window_frames == RetentionConfig().window_tokens
