import base64

import pytest

from lab.load_client.turn_tracker import SETTLE_S, TurnTracker
from sglang_live.clock import SimClock

PACKET_100_MS = bytes(4800)


@pytest.fixture
def clock():
    return SimClock(100.0)


@pytest.fixture
def tracker(clock):
    return TurnTracker(clock, "speech", user_audio_s=1.0)


def created(tracker, response_id="r"):
    tracker.on_event({"type": "response.created", "response": {"id": response_id}})


def audio(tracker, packet=PACKET_100_MS, response_id="r"):
    delta = base64.b64encode(packet).decode()
    event = {"type": "response.output_audio.delta", "response_id": response_id, "delta": delta}
    tracker.on_event(event)


def done(tracker, status="completed", response_id="r", **details):
    response = {"id": response_id, "status": status, **details}
    tracker.on_event({"type": "response.done", "response": response})


def vad(tracker, what):
    tracker.on_event({"type": f"input_audio_buffer.speech_{what}"})


def test_times_count_from_the_end_of_the_users_speech(clock, tracker):
    tracker.user_finished()
    clock.advance(0.5)
    vad(tracker, "stopped")
    clock.advance(0.1)
    created(tracker)
    clock.advance(0.2)
    audio(tracker)
    clock.advance(0.05)
    audio(tracker)
    done(tracker)
    assert tracker.is_over()
    record = tracker.record()
    assert record.ok
    assert record.end_of_turn_ms == pytest.approx(500)
    assert record.ttfp_ms == pytest.approx(800)
    assert record.ttfp_after_detection_ms == pytest.approx(300)
    assert record.audio_s == pytest.approx(0.2)
    assert record.generation_s == pytest.approx(0.25)
    assert record.rtf == pytest.approx(1.25)
    assert record.gaps_over_100ms == 0


def test_a_stall_of_the_response_is_counted(clock, tracker):
    tracker.user_finished()
    created(tracker)
    audio(tracker)
    clock.advance(0.35)
    audio(tracker)
    done(tracker)
    assert tracker.record().gaps_over_100ms == 1
    assert tracker.record().gaps_ms == pytest.approx((250.0,))


def test_an_empty_packet_is_not_first_audio(clock, tracker):
    tracker.user_finished()
    created(tracker)
    audio(tracker, b"")
    clock.advance(0.4)
    audio(tracker)
    assert tracker.response.first_audio_s == clock.now_s()


@pytest.mark.parametrize("delta", ["%%%", base64.b64encode(b"odd").decode()])
def test_an_undecodable_packet_fails_the_turn(tracker, delta):
    tracker.user_finished()
    created(tracker)
    event = {"type": "response.output_audio.delta", "response_id": "r", "delta": delta}
    tracker.on_event(event)
    assert tracker.is_over()
    assert tracker.record().status == "error"


def test_completed_without_audio_is_not_a_success(tracker):
    tracker.user_finished()
    created(tracker)
    done(tracker)
    assert tracker.record().status == "empty"


def test_a_text_only_response_needs_no_audio(tracker):
    tracker.user_finished()
    created(tracker)
    event = {"type": "response.output_text.delta", "response_id": "r", "delta": "Hello."}
    tracker.on_event(event)
    done(tracker)
    assert tracker.record().ok
    assert tracker.record().transcript == "Hello."


def test_the_response_after_the_speech_counts_and_not_one_in_a_pause(clock, tracker):
    vad(tracker, "stopped")
    created(tracker, "early")
    audio(tracker, response_id="early")
    vad(tracker, "started")
    done(tracker, "cancelled", "early", status_details={"reason": "turn_detected"})
    tracker.user_finished()
    assert not tracker.is_over()
    clock.advance(SETTLE_S)
    assert not tracker.is_over(), "the server still detects speech"
    vad(tracker, "stopped")
    clock.advance(SETTLE_S)
    assert not tracker.is_over(), "a response is due"
    created(tracker, "late")
    audio(tracker, response_id="early")
    audio(tracker, response_id="late")
    done(tracker, "completed", "late")
    assert tracker.is_over()
    record = tracker.record()
    assert record.response_id == "late"
    assert record.audio_packets == 1
    assert record.early_replies == 1


def test_an_early_response_counts_if_no_other_follows(clock, tracker):
    vad(tracker, "stopped")
    created(tracker)
    audio(tracker)
    done(tracker)
    clock.advance(0.1)
    tracker.user_finished()
    assert not tracker.is_over()
    clock.advance(SETTLE_S)
    assert tracker.is_over()
    assert tracker.record().ttfp_ms == pytest.approx(-100)


def test_a_failed_response_has_its_reason(tracker):
    tracker.user_finished()
    created(tracker)
    done(tracker, "failed", status_details={"error": {"message": "talker died"}})
    assert tracker.record().status == "failed"
    assert tracker.record().error == "talker died"


def test_an_error_event_ends_the_turn_unless_it_is_harmless(tracker):
    error = {"type": "invalid_request_error", "code": "response_cancel_not_active", "message": "m"}
    tracker.on_event({"type": "error", "error": error})
    assert not tracker.is_over()
    tracker.on_event({"type": "error", "error": {**error, "code": "server_overloaded"}})
    assert tracker.is_over()
    assert tracker.record().error == "server_overloaded: m"


def test_the_first_failure_is_the_one_reported(tracker):
    tracker.fail("error", "full")
    tracker.fail("closed", "bye")
    assert tracker.record().status == "error"


def barged(clock, tracker, onset_after_s=0.5):
    """A turn whose response has played for half a second when the user interrupts it."""
    tracker.user_finished()
    created(tracker)
    for _ in range(10):
        audio(tracker)
    clock.advance(onset_after_s)
    tracker.interrupted("barge_in")
    clock.advance(0.02)
    tracker.interruption_began()


def test_stop_latency_counts_from_the_onset_to_the_last_packet(clock, tracker):
    barged(clock, tracker)
    clock.advance(0.15)
    audio(tracker)
    clock.advance(0.05)
    tracker.response.flush(clock.now_s())
    done(tracker, "cancelled")
    record = tracker.record()
    assert record.ok
    assert record.stop_latency_ms == pytest.approx(150)
    assert record.silence_ms == pytest.approx(200)
    assert record.truncated_ms == pytest.approx(500)
    assert record.heard_s == pytest.approx(0.72)
    assert record.audio_s == pytest.approx(1.1)


def test_stop_latency_is_zero_if_nothing_came_after_the_onset(clock, tracker):
    barged(clock, tracker)
    clock.advance(0.1)
    done(tracker, "cancelled")
    assert tracker.record().stop_latency_ms == 0


def test_a_response_that_was_over_before_the_onset_had_nothing_to_stop(clock, tracker):
    tracker.user_finished()
    created(tracker)
    for _ in range(10):
        audio(tracker)
    done(tracker)
    clock.advance(0.5)
    tracker.interrupted("barge_in")
    tracker.interruption_began()
    clock.advance(0.1)
    tracker.response.flush(clock.now_s())
    record = tracker.record()
    assert record.stop_latency_ms is None
    assert record.silence_ms == pytest.approx(100)
    assert record.cut_short
    assert record.ok


def test_after_a_barge_in_the_next_turns_events_do_not_count(clock, tracker):
    barged(clock, tracker)
    vad(tracker, "stopped")
    created(tracker, "next")
    audio(tracker, response_id="next")
    done(tracker, "cancelled")
    record = tracker.record()
    assert record.response_id == "r"
    assert record.audio_packets == 10
    assert record.end_of_turn_ms is None


def test_an_interrupted_response_that_never_ends_is_a_failure(clock, tracker):
    barged(clock, tracker)
    assert tracker.record().status == "unstopped"
    assert not tracker.record().ok


def test_after_a_noise_the_turn_goes_on_until_the_response_to_it_ends(clock, tracker):
    tracker.user_finished()
    created(tracker)
    audio(tracker)
    tracker.interrupted("false_trigger")
    vad(tracker, "started")
    done(tracker, "cancelled")
    clock.advance(SETTLE_S)
    assert not tracker.is_over(), "the server still detects the noise"
    vad(tracker, "stopped")
    created(tracker, "to_the_noise")
    audio(tracker, response_id="to_the_noise")
    clock.advance(SETTLE_S)
    assert not tracker.is_over(), "it responds to the noise"
    done(tracker, "completed", "to_the_noise")
    clock.advance(SETTLE_S)
    assert tracker.is_over()
    assert tracker.record().response_id == "r"
    assert tracker.record().wrongly_interrupted


def test_an_interruption_counts_from_the_first_packet(clock, tracker):
    tracker.user_finished()
    created(tracker)
    assert tracker.until_interruption_s(1.0) is None
    clock.advance(3.0)
    audio(tracker)
    clock.advance(0.25)
    assert tracker.until_interruption_s(1.0) == pytest.approx(0.75)
