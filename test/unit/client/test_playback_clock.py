import asyncio

from sglang_live.client.playback_clock import PlaybackClock
from sglang_live.clock import SimClock


def test_playback_starts_at_the_first_packet():
    clock = SimClock()
    playback = PlaybackClock(clock)
    clock.advance(5.0)
    assert playback.buffered_s == 0.0
    playback.packet_received(1.0)
    assert playback.buffered_s == 1.0
    assert playback.gaps_s == []


def test_a_packet_in_time_leaves_no_gap():
    clock = SimClock()
    playback = PlaybackClock(clock)
    playback.packet_received(0.5)
    clock.advance(0.5)
    playback.packet_received(0.5)
    assert playback.gaps_s == []
    assert playback.buffered_s == 0.5


def test_a_late_packet_is_a_gap_as_long_as_the_silence_was():
    clock = SimClock()
    playback = PlaybackClock(clock)
    playback.packet_received(0.5)
    clock.advance(0.75)
    assert playback.buffered_s == -0.25
    playback.packet_received(0.5)
    assert playback.gaps_s == [0.25]
    assert playback.buffered_s == 0.5, "playback resumes where it stopped"


def test_only_gaps_over_100_ms_are_audible():
    clock = SimClock()
    playback = PlaybackClock(clock)
    for silence_s in (0.05, 0.099, 0.2):
        playback.packet_received(1.0)
        clock.advance(1.0 + silence_s)
    playback.packet_received(1.0)
    assert len(playback.gaps_s) == 3
    assert playback.audible_gaps == 1


def test_heard_audio_never_exceeds_received_audio():
    clock = SimClock()
    playback = PlaybackClock(clock)
    playback.packet_received(1.0)
    clock.advance(0.25)
    assert playback.heard_s == 0.25
    clock.advance(10.0)
    assert playback.heard_s == 1.0


async def test_waiting_includes_a_packet_that_came_meanwhile():
    clock = SimClock()
    playback = PlaybackClock(clock)
    playback.packet_received(1.0)
    waiting = asyncio.create_task(playback.wait_until_played())
    await asyncio.sleep(0)
    playback.packet_received(1.0)
    clock.advance(1.0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    clock.advance(1.0)
    await asyncio.wait_for(waiting, 10.0)


def test_a_chunk_is_on_time_if_it_comes_before_the_end_of_those_before_it():
    clock = SimClock()
    playback = PlaybackClock(clock)
    # Chunks of 1 s; due at 1, 2 and 3 s after the first, with or without stalls.
    for arrival_s in (10.0, 11.0, 12.5, 12.9):
        clock.advance(arrival_s - clock.now_s())
        playback.packet_received(1.0)
    assert playback.chunks_due == 3
    assert playback.chunks_on_time == 2


def test_after_a_flush_no_packet_is_heard_or_late():
    clock = SimClock()
    playback = PlaybackClock(clock)
    playback.packet_received(1.0)
    clock.advance(0.25)
    playback.flush()
    clock.advance(5.0)
    playback.packet_received(1.0)
    assert playback.heard_s == 0.25
    assert playback.received_s == 2.0
    assert playback.buffered_s == 0.0
    assert playback.gaps_s == []
    assert playback.chunks_due == 0
