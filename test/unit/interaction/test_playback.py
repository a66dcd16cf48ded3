"""What the user has heard: by the clock, by acks, and with acks that are wrong."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_live.interaction.playback import (
    ACK_TIMEOUT_S,
    ACK_TOLERANCE_S,
    STANDSTILL_S,
    PlaybackClock,
)


def playing(sent_s: float = 10.0, at_s: float = 0.0) -> PlaybackClock:
    clock = PlaybackClock()
    clock.sent(sent_s, at_s)
    return clock


def test_nothing_is_heard_before_the_first_packet():
    clock = PlaybackClock()
    assert clock.heard_s(100.0) == 0.0
    assert not clock.playing(100.0)
    assert clock.next_change_s(100.0) is None


def test_without_acks_it_runs_at_real_time_from_the_first_packet_up_to_what_was_sent():
    clock = playing(1.0, at_s=5.0)
    clock.sent(1.0, 5.1)
    assert clock.heard_s(5.5) == pytest.approx(0.5)
    assert clock.heard_s(6.9) == pytest.approx(1.9)
    assert clock.heard_s(60.0) == 2.0
    assert clock.playing(6.9)
    assert not clock.playing(7.1)
    assert clock.next_change_s(6.0) == pytest.approx(7.0)


def test_dry_playback_goes_on_when_more_is_sent_and_the_gap_is_an_underrun():
    clock = playing(0.5)
    clock.sent(0.5, 0.8)
    assert clock.heard_s(0.8) == 0.5
    assert clock.heard_s(1.0) == pytest.approx(0.7)
    assert clock.underruns == 1
    assert clock.underrun_s == pytest.approx(0.3)


def test_a_gap_shorter_than_a_jitter_buffer_is_no_underrun():
    clock = playing(0.5)
    clock.sent(0.5, 0.51)
    assert clock.underruns == 0
    assert clock.heard_s(1.0) == pytest.approx(0.99)


def test_silence_after_the_end_and_silence_on_purpose_are_no_underruns():
    done = playing(0.5)
    done.finish(0.9)
    assert done.over(1.0)
    assert done.underruns == 0
    held = playing(0.5)
    held.excuse_silence(1.0)
    held.sent(0.5, 1.0)
    assert held.underruns == 0
    assert held.heard_s(1.2) == pytest.approx(0.7)


def test_it_is_over_when_everything_was_sent_and_heard():
    clock = playing(1.0)
    assert not clock.over(2.0)  # dry, but there may be more
    clock.finish(2.0)
    assert clock.over(2.0)
    early = playing(1.0)
    early.finish(0.1)
    assert not early.over(0.9)
    assert early.over(1.0)


def test_a_response_behind_another_is_not_heard_before_that_has_played_out():
    clock = PlaybackClock(not_before_s=3.0)
    clock.sent(1.0, 0.0)
    assert clock.heard_s(2.9) == 0.0
    assert not clock.playing(2.9)
    assert clock.next_change_s(2.9) == 3.0
    assert clock.heard_s(3.5) == pytest.approx(0.5)


def test_an_ack_moves_the_clock_back_and_it_goes_on_from_there():
    clock = playing()
    assert clock.ack(0.4, 1.0) == "accepted"
    assert clock.heard_s(1.0) == pytest.approx(0.4)
    assert clock.heard_s(1.5) == pytest.approx(0.9)


def test_an_ack_moves_the_clock_forward_after_the_client_had_fallen_behind():
    clock = playing()
    clock.ack(0.2, 1.0)
    assert clock.ack(1.9, 2.0) == "accepted"
    assert clock.heard_s(2.0) == pytest.approx(1.9)


def test_between_acks_it_never_runs_beyond_what_was_sent():
    clock = playing(1.0)
    clock.ack(0.9, 1.0)
    assert clock.heard_s(2.5) == 1.0


@pytest.mark.parametrize(
    ("acked_s", "at_s", "outcome", "heard_s"),
    [
        (50.0, 3.0, "beyond_sent", 3.0 + ACK_TOLERANCE_S),
        (5.0, 1.0, "too_fast", 1.0 + ACK_TOLERANCE_S),
        (10.1, 30.0, "accepted", 10.0),
    ],
)
def test_an_ack_beyond_the_audio_sent_or_real_time_is_clamped_and_counted(
    acked_s, at_s, outcome, heard_s
):
    clock = playing(10.0)
    assert clock.ack(acked_s, at_s) == outcome
    assert clock.heard_s(at_s) == pytest.approx(heard_s)
    assert clock.acks == {outcome: 1}


def test_a_correct_ack_after_a_wrong_one_is_accepted():
    clock = playing()
    clock.ack(9.0, 1.0)
    assert clock.ack(0.8, 1.2) == "accepted"
    assert clock.heard_s(1.2) == pytest.approx(0.8)


def test_an_ack_that_goes_backwards_is_counted_and_ignored():
    clock = playing()
    clock.ack(1.0, 1.1)
    assert clock.ack(0.5, 1.2) == "backwards"
    assert clock.heard_s(1.2) == pytest.approx(1.1)
    assert clock.playing(1.2)


def test_an_ack_before_any_audio_has_no_effect():
    clock = PlaybackClock()
    assert clock.ack(0.0, 1.0) == "early"
    assert clock.heard_s(1.0) == 0.0


def test_a_duplicate_soon_after_is_only_a_duplicate():
    clock = playing()
    clock.ack(1.0, 1.0)
    assert clock.ack(1.0, 1.1) == "duplicate"
    assert clock.playing(1.1)
    assert clock.heard_s(1.1) == pytest.approx(1.1)


def test_a_client_that_reports_a_standstill_is_paused_until_its_position_moves():
    clock = playing()
    for at_s in (1.0, 1.3, 1.0 + STANDSTILL_S):
        clock.ack(1.0, at_s)
    assert not clock.playing(1.6)
    assert clock.heard_s(2.5) == pytest.approx(1.0)
    clock.ack(1.2, 3.0)
    assert clock.playing(3.0)
    assert clock.heard_s(3.5) == pytest.approx(1.7)


def test_a_dry_client_that_repeats_its_ack_is_not_paused_when_audio_comes():
    clock = playing(1.0)
    for at_s in (1.0, 2.0, 3.0):
        clock.ack(1.0, at_s)
    clock.sent(1.0, 3.1)
    clock.ack(1.0, 3.15)  # said before the audio arrived
    assert clock.playing(3.15)
    assert clock.heard_s(3.6) == pytest.approx(1.5)


def test_acks_that_stop_coming_leave_the_clock_running_from_the_last_one():
    clock = playing()
    clock.ack(0.5, 1.0)
    assert clock.by_acks
    clock.check(1.0 + ACK_TIMEOUT_S)
    assert clock.by_acks
    clock.check(3.1)
    assert not clock.by_acks
    assert clock.ack_timeouts == 1
    assert clock.heard_s(3.1) == pytest.approx(2.6)
    clock.check(9.0)
    assert clock.ack_timeouts == 1


def test_a_pause_without_further_acks_ends_by_itself_without_a_jump():
    clock = playing()
    clock.ack(1.0, 1.0)
    clock.ack(1.0, 2.0)
    assert clock.next_change_s(2.0) == 2.0 + ACK_TIMEOUT_S
    assert clock.heard_s(4.0) == pytest.approx(1.0)
    assert clock.heard_s(4.5) == pytest.approx(1.5)
    clock.check(4.5)
    assert clock.ack_timeouts == 1
    assert clock.heard_s(4.5) == pytest.approx(1.5)


def test_a_client_with_nothing_to_play_need_not_send_acks():
    clock = playing(1.0)
    clock.ack(0.9, 1.0)
    clock.sent(1.0, 9.0)
    assert clock.by_acks
    assert clock.ack_timeouts == 0


def test_stopped_playback_hears_no_more_but_acks_may_correct_it():
    clock = playing()
    assert clock.stop(2.0) == pytest.approx(2.0)
    assert clock.heard_s(5.0) == pytest.approx(2.0)
    assert not clock.playing(5.0)
    clock.sent(0.2, 2.1)  # was in the network's hands already
    assert clock.heard_s(5.0) == pytest.approx(2.0)
    clock.ack(1.6, 2.2)
    assert clock.heard_s(5.0) == pytest.approx(1.6)


def test_a_truncation_counts_up_to_the_audio_sent():
    clock = playing(1.0)
    assert clock.correct(0.3, 5.0) == pytest.approx(0.3)
    assert clock.correct(1.4, 5.0) == pytest.approx(1.0)
    assert clock.over(5.0)


def test_a_standstill_before_the_beginning_is_no_audio_heard():
    clock = PlaybackClock()
    clock.sent(1.0, now_s=0.0)
    clock.ack(0.0, now_s=0.0)
    clock.ack(-1e-9, now_s=1.0)
    assert clock.heard_s(1.0) == 0.0


steps = st.lists(
    st.tuples(
        st.sampled_from(["sent", "ack", "look", "excuse", "finish", "stop", "correct"]),
        st.floats(0.0, 3.0),  # time until then
        st.floats(-1.0, 12.0),  # duration or position
    ),
    max_size=40,
)


@settings(max_examples=300)
@given(steps, st.floats(0.0, 2.0))
def test_heard_audio_always_stays_within_the_audio_sent_and_real_time(steps, buffered_s):
    clock = PlaybackClock(not_before_s=buffered_s)
    now_s, began_s = 0.0, None
    for what, wait_s, value in steps:
        before_s, then_s = clock.heard_s(now_s), now_s
        now_s += wait_s
        # By time alone it grows, and no faster than time.
        grown_s = clock.heard_s(now_s) - before_s
        assert -1e-9 <= grown_s <= now_s - then_s + 1e-6
        if what == "sent":
            began_s = now_s if began_s is None else began_s
            clock.sent(abs(value), now_s)
        elif what == "ack":
            clock.ack(value, now_s)
        elif what == "look":
            clock.check(now_s)
        elif what == "excuse":
            clock.excuse_silence(now_s)
        elif what == "correct":
            clock.correct(value, now_s)
        else:
            getattr(clock, what)(now_s)
        heard_s = clock.heard_s(now_s)
        assert 0.0 <= heard_s <= clock.sent_s
        if what == "correct":
            return  # the client's cut is a fact, whatever the clock says
        if began_s is not None:
            assert heard_s <= now_s - began_s + ACK_TOLERANCE_S + 1e-6
        if (change_s := clock.next_change_s(now_s)) is not None:
            assert change_s > now_s
            assert clock.playing(now_s) != clock.playing(change_s + 1e-6)
