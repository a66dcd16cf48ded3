import pytest

from sglang_live.report import spans
from sglang_live.report.documents import Timeline


@pytest.fixture
def call(timeline) -> Timeline:
    return Timeline.of(timeline)


def test_speech_begins_where_the_voice_did_not_where_it_was_noticed(call):
    assert spans.spans(call, spans.SPEECH) == [(0.8, 3.4), (5.6, 7.5)]


def test_a_suspicion_ends_with_the_verdict(call):
    assert spans.spans(call, spans.SUSPICION) == [(0.8, 1.0), (5.6, 5.8), (9.2, 9.5)]
    assert spans.spans(call, spans.HOLD) == [(5.0, 5.5)]


def test_what_is_still_open_ends_with_the_timeline():
    events = [{"t_s": 1.0, "event": "speech_started"}, {"t_s": 4.0, "event": "held"}]
    call = Timeline.of({"session": "s", "events": events})
    assert spans.spans(call, spans.SPEECH) == [(1.0, 4.0)]


def test_a_reply_that_was_cut_is_not_played_on(call):
    first, _ = spans.reply_curves(call)
    assert first.cut_s == 5.8
    assert first.playing == (3.7, 5.8)
    assert first.unheard_s == pytest.approx(4.0 - 2.1)
    assert first.generated == [(4.7, 3.5)]
    assert (first.created_s, first.done_s) == (3.45, 5.9)


def test_a_reply_is_heard_out_after_its_last_packet(call):
    _, second = spans.reply_curves(call)
    assert second.cut_s is None
    assert second.unheard_s == 0
    # At 9 s 0.75 s of 3 s had been heard.
    assert second.playing == pytest.approx((8.0, 11.25))


def test_only_a_stall_in_the_middle_of_a_reply_counts_as_dry(call, timeline):
    assert spans.dry_spans(call) == [(8.5, 8.75)]
    end = {"t_s": 11.25, "event": "dry", "response": "resp_2"}
    other = {"t_s": 15.0, "event": "playing", "response": "resp_3"}
    timeline["events"] += [end, other]
    assert spans.dry_spans(Timeline.of(timeline)) == [(8.5, 8.75)]


def test_the_servers_own_underruns_are_preferred(timeline):
    timeline["events"].append({"t_s": 8.75, "event": "underrun", "silent_s": 0.25})
    assert spans.dry_spans(Timeline.of(timeline)) == [(8.5, 8.75)]
