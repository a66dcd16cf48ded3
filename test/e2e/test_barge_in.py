"""Interruptions over /v1/realtime: their causes, and the kept part of a response.

The demo model's responses end at random. Greedy ones rarely end, so these are interrupted here; a
test whose response was too short, or too long, runs again.
"""

import asyncio
import time

import numpy as np
import pytest

from test.e2e.conftest import wait_until
from test.e2e.interrupter import (
    CUT,
    DELTA,
    DONE,
    PINGED_S,
    RETRIEVABLE_MS,
    STARTED,
    STOPPED,
    TEXT,
    Counts,
    UnsuitableResponse,
    burst,
    cached_tokens,
    cancelled,
    check_compaction,
    click,
    detection,
    listen,
    long_response,
    of_item,
    received_ms,
    request,
    retrieve,
    said,
    session_tokens,
    since,
    sound_ms,
    speech_over_response,
    truncate,
    truncated,
    until_suitable,
    voice,
)
from test.e2e.socket_client import connected, is_whole

pytestmark = [pytest.mark.e2e]


@pytest.fixture(scope="module", autouse=True)
def settled_figures(server) -> None:
    """Wait for the stages' counters of earlier tests."""
    time.sleep(3)


@until_suitable
async def test_speech_over_a_response_ends_it_and_gets_a_response(server):
    counts = Counts(server)
    async with connected(server.ws) as socket:
        first = await socket.ask("hello", **TEXT)
        item_id = await long_response(socket, 1.5)
        speaking = asyncio.create_task(socket.speak(voice()))
        try:
            started, done = await speech_over_response(socket)
            cut = await truncated(socket)
            after = await socket.until(DONE)
        finally:
            speaking.cancel()
        shown = await retrieve(socket, item_id)
        last = await socket.ask("and then", **TEXT)
    assert 0 <= started["audio_start_ms"] < 2000
    assert cut["item_id"] == item_id
    assert not [e for e in since(socket, done) if e.get("response_id") == done["response"]["id"]]
    check_compaction(socket, item_id, shown)
    usage = after["response"]["usage"]
    assert usage["input_token_details"]["audio_tokens"] > 30
    assert cached_tokens(after) >= session_tokens(first)
    assert cached_tokens(last) >= session_tokens(after)
    assert counts.gateway("barge_ins_total") == 1
    counts.check_compactions(1)


@until_suitable
async def test_a_cough_over_a_response_does_not_end_it(server):
    counts = Counts(server)
    async with connected(server.ws) as socket:
        await request(socket, "tell me a long story")
        await socket.until(DELTA)
        coughing = asyncio.create_task(socket.speak(np.concatenate([click(), burst()])))
        done = await socket.until(DONE)
        if not coughing.done():
            coughing.cancel()
            raise UnsuitableResponse
    kinds = {event["type"] for event in socket.events}
    assert not kinds & {STARTED, CUT, "error"}
    assert counts.gateway("false_alarms_total") == 1
    assert counts.gateway("barge_ins_total") == 0
    assert is_whole(done), done
    # The held audio was released.
    audio_s = done["response"]["usage"]["output_token_details"]["audio_tokens"] / 12.5
    assert len(socket.audio()) / 24_000 == pytest.approx(audio_s, abs=0.1)


@until_suitable
async def test_without_a_window_the_same_cough_interrupts(server):
    counts = Counts(server)
    async with connected(server.ws) as socket:
        await detection(socket, confirm_ms=0)
        item_id = await long_response(socket, 1.0)
        await socket.append(burst())
        await speech_over_response(socket)
        cut = await truncated(socket)
        after = await socket.until(DONE)
    assert cut["item_id"] == item_id
    assert is_whole(after), after
    assert counts.gateway("barge_ins_total") == 1
    assert counts.gateway("false_alarms_total") == 0
    counts.check_compactions(1)


@until_suitable
async def test_with_interruption_off_the_response_continues_and_the_new_turn_waits(server):
    counts = Counts(server)
    async with connected(server.ws) as socket:
        await detection(socket, interrupt_response=False)
        await request(socket, "tell me a long story", output_modalities=["audio"])
        await socket.until(DELTA)
        await socket.append(voice(), step=480)
        if (await socket.until(STOPPED, DONE))["type"] == DONE:
            raise UnsuitableResponse
        first = await socket.until(DONE)
        created = await socket.until("response.created")
        second = await socket.until(DONE)
    kinds = [event["type"] for event in socket.events]
    assert STARTED in kinds
    assert CUT not in kinds
    assert kinds.index("response.created") < kinds.index(STARTED) < kinds.index(DONE)
    assert kinds.count("response.created") == kinds.count(DONE) == 2
    assert is_whole(first), first
    audio_s = first["response"]["usage"]["output_token_details"]["audio_tokens"] / 12.5
    assert len(socket.audio()) / 24_000 == pytest.approx(audio_s, abs=0.1)
    assert created["response"]["id"] == second["response"]["id"]
    assert second["response"]["usage"]["input_token_details"]["audio_tokens"] > 30
    assert cached_tokens(second) >= session_tokens(first)
    assert counts.gateway("barge_ins_total") == 0


@until_suitable
async def test_a_cancelled_response_keeps_its_kv_and_can_be_truncated(server):
    counts = Counts(server)
    async with connected(server.ws) as socket:
        first = await socket.ask("hello", **TEXT)
        item_id = await long_response(socket, 1.0)
        done = await cancelled(socket)
        too_long = await truncate(socket, item_id, int(received_ms(socket, item_id)) + 60_000)
        assert not of_item(socket, CUT, item_id)
        cut = await truncate(socket, item_id, 400)
        after = await socket.ask("go on", **TEXT)
        shown = await retrieve(socket, item_id)
        last = await socket.ask("and then", **TEXT)
    assert not [e for e in since(socket, done) if e.get("response_id") == done["response"]["id"]]
    assert too_long["error"]["param"] == "audio_end_ms"
    assert (cut["type"], cut["item_id"], cut["audio_end_ms"]) == (CUT, item_id, 400)
    check_compaction(socket, item_id, shown)
    assert cached_tokens(after) >= session_tokens(first)
    assert cached_tokens(last) >= session_tokens(after)
    counts.check_compactions(1)


@until_suitable
async def test_a_cancelled_response_without_truncation_counts_up_to_its_last_sent_audio(server):
    counts = Counts(server)
    async with connected(server.ws) as socket:
        first = await socket.ask("hello", **TEXT)
        item_id = await long_response(socket, 1.0)
        await cancelled(socket)
        after = await socket.ask("go on", **TEXT)
        shown = await retrieve(socket, item_id)
    assert CUT not in {event["type"] for event in socket.events}
    assert shown["transcript"]
    if said(socket, item_id) == shown["transcript"]:
        raise UnsuitableResponse  # no text was made ahead of the sound
    assert said(socket, item_id).startswith(shown["transcript"])
    assert sound_ms(shown) == received_ms(socket, item_id)
    assert cached_tokens(after) >= session_tokens(first)
    counts.check_compactions(1)


@until_suitable
async def test_a_finished_response_can_be_truncated_at_once_and_later(server):
    counts = Counts(server)
    async with connected(server.ws) as socket:
        first = await socket.ask("hello")
        item_id = first["response"]["output"][0]["id"]
        if received_ms(socket, item_id) > RETRIEVABLE_MS:
            raise UnsuitableResponse
        whole = await retrieve(socket, item_id)
        too_long = await truncate(socket, item_id, int(received_ms(socket, item_id)) + 60_000)
        unchanged = await retrieve(socket, item_id)
        # Half of the audio has half of the text; a shorter part may have none.
        half_ms = int(received_ms(socket, item_id) / 2)
        at_once = await truncate(socket, item_id, half_ms)
        shown = await retrieve(socket, item_id)
        second = await socket.ask("go on", **TEXT)
        counts.check_compactions(1)
        late = await truncate(socket, item_id, 200)
        shown_late = await retrieve(socket, item_id)
        third = await socket.ask("and then", **TEXT)
        fourth = await socket.ask("and now", **TEXT)
    assert too_long["error"]["param"] == "audio_end_ms"
    assert unchanged == whole
    assert whole["transcript"] == said(socket, item_id)
    assert (at_once["type"], at_once["audio_end_ms"]) == (CUT, half_ms)
    assert sound_ms(shown) == half_ms
    assert whole["transcript"].startswith(shown["transcript"])
    assert 0 < len(shown["transcript"]) < len(whole["transcript"])
    # All tokens before the response are kept; only its kept part is prefilled again.
    kept = first["response"]["usage"]["input_tokens"]
    assert cached_tokens(second) >= kept
    assert (late["type"], late["audio_end_ms"]) == (CUT, 200)
    assert sound_ms(shown_late) == 200
    assert shown["transcript"].startswith(shown_late["transcript"])
    # An older response is not the end of the session, which is rebuilt once.
    wait_until(lambda: counts.thinker("sessions_rebuilt") == 1, PINGED_S, "a session rebuilt")
    assert is_whole(third), third
    assert cached_tokens(fourth) >= session_tokens(third)


@until_suitable
async def test_acks_of_a_client_that_is_behind_are_accepted(server):
    counts = Counts(server)
    async with connected(server.ws) as socket:
        await detection(socket)
        item_id = await long_response(socket, 0.5)
        for _ in range(9):
            # The same position again: playback is paused.
            await socket.send("playback.ack", item_id=item_id, audio_end_ms=200)
            await listen(socket, 0.25)
        await socket.send("playback.ack", item_id=item_id, audio_end_ms=200)
        await socket.append(voice(), step=480)
        await speech_over_response(socket)
        cut = await truncated(socket)
        after = await socket.until(DONE)
        shown = await retrieve(socket, item_id)
    # By the clock it would be more than two seconds.
    assert 200 <= cut["audio_end_ms"] <= 1000
    check_compaction(socket, item_id, shown)
    assert is_whole(after), after
    assert counts.gateway('playback_acks_total{outcome="accepted"}') == 1
    assert counts.gateway('playback_acks_total{outcome="duplicate"}') == 9
    counts.check_compactions(1)


@until_suitable
async def test_impossible_acks_are_clamped_and_unknown_items_refused(server):
    counts = Counts(server)
    async with connected(server.ws) as socket:
        await detection(socket)
        item_id = await long_response(socket, 1.0)
        for acked_ms in (10_000_000, 0, 10_000_000):
            await socket.send("playback.ack", item_id=item_id, audio_end_ms=acked_ms)
        await socket.send("playback.ack", item_id="item_unknown", audio_end_ms=100)
        refused = await socket.until("error")
        # The response continues.
        for _ in range(3):
            if (await socket.until(DELTA, DONE))["type"] == DONE:
                raise UnsuitableResponse
        await socket.append(voice(), step=480)
        await speech_over_response(socket)
        after = await socket.until(DONE)
        shown = await retrieve(socket, item_id)
    assert refused["error"]["code"] == "item_ack_invalid_item_id"
    sent_ms = received_ms(socket, item_id)
    assert all(e["audio_end_ms"] <= sent_ms for e in of_item(socket, CUT, item_id))
    assert sound_ms(shown) <= sent_ms
    assert said(socket, item_id).startswith(shown["transcript"])
    assert is_whole(after), after
    assert counts.gateway('playback_acks_total{outcome="beyond_sent"}') == 2
    assert counts.gateway('errors_total{code="item_ack_invalid_item_id"}') == 1
    counts.check_compactions(1)


def test_the_stages_are_free_after_all_sessions_have_ended(server):
    server.wait_until_free()
    log = (server.log_dir / "server.log").read_text()
    for trouble in ("turn_crashed", "turns_stuck", "turn_not_interrupted"):
        assert trouble not in log
