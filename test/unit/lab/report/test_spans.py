import pytest

from lab.report import spans
from lab.report.documents import Timeline


@pytest.fixture
def session(timeline) -> Timeline:
    return Timeline.of(timeline)


def test_speech_begins_at_its_onset_and_not_at_its_detection(session):
    assert spans.spans(session, spans.SPEECH) == [(0.8, 3.4), (5.6, 7.5)]


def test_a_suspicion_ends_with_the_verdict(session):
    assert spans.spans(session, spans.SUSPICION) == [(0.8, 1.0), (5.6, 5.8), (9.2, 9.5)]
    assert spans.spans(session, spans.HOLD) == [(5.0, 5.5)]


def test_an_open_span_ends_with_the_timeline():
    events = [{"t_s": 1.0, "event": "speech_started"}, {"t_s": 4.0, "event": "held"}]
    session = Timeline.of({"session": "s", "events": events})
    assert spans.spans(session, spans.SPEECH) == [(1.0, 4.0)]


def test_a_truncated_response_is_not_played_on(session):
    first, _ = spans.response_curves(session)
    assert first.truncated_s == 5.8
    assert first.playing == (3.7, 5.8)
    assert first.unheard_s == pytest.approx(4.0 - 2.1)
    assert first.generated == [(4.7, 3.5)]
    assert (first.created_s, first.done_s) == (3.45, 5.9)


def test_a_response_is_heard_to_its_end_after_its_last_packet(session):
    _, second = spans.response_curves(session)
    assert second.truncated_s is None
    assert second.unheard_s == 0
    # At 9 s, 0.75 s of 3 s were heard.
    assert second.playing == pytest.approx((8.0, 11.25))


def test_only_a_stall_in_the_middle_of_a_response_counts(session, timeline):
    assert spans.stall_spans(session) == [(8.5, 8.75)]
    end = {"t_s": 11.25, "event": "dry", "response": "resp_2"}
    other = {"t_s": 15.0, "event": "playing", "response": "resp_3"}
    timeline["events"] += [end, other]
    assert spans.stall_spans(Timeline.of(timeline)) == [(8.5, 8.75)]


def test_underruns_of_the_server_are_preferred(timeline):
    timeline["events"].append({"t_s": 8.75, "event": "underrun", "silent_s": 0.25})
    assert spans.stall_spans(Timeline.of(timeline)) == [(8.5, 8.75)]


def stream(t_s: float, what: str, stage: str = "talker") -> dict:
    return {"t_s": t_s, "event": "stream", "response": "r", "stage": stage, "what": what}


def test_a_class_lasts_until_the_next_one_or_the_end_of_the_response():
    events = [
        {"t_s": 1.0, "event": "response_created", "response": "r"},
        stream(1.1, "u1"),
        stream(1.2, "u1", "thinker"),
        stream(1.5, "u2"),
        stream(2.0, "paused"),
        stream(2.5, "resumed"),
        stream(3.0, "held"),
        {"t_s": 4.0, "event": "barge_in", "response": "r"},
    ]
    timeline = Timeline.of({"session": "s", "events": events, "dropped": 0})
    talker = spans.stream_spans(timeline, "talker")
    assert talker["u1"] == [(1.1, 1.5)]
    assert talker["u2"] == [(1.5, 4.0)]
    assert talker["paused"] == [(2.0, 2.5), (3.0, 4.0)]
    assert spans.stream_spans(timeline, "thinker")["u1"] == [(1.2, 4.0)]
