"""Interruptions over /v1/realtime: what ends an answer, what does not, and what is kept of it.

The demo's answers end by chance. Greedy ones rarely end, so those are what callers speak over
here; a call whose answer was too short all the same, or too long, is made again.
"""

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import wraps

import httpx
import numpy as np
import pytest

from test.e2e.conftest import Server, wait_until
from test.e2e.socket_client import Socket, clip_24k, connected

pytestmark = [pytest.mark.e2e]

GREEDY = {"temperature": 0, "output_modalities": ["audio"]}
TEXT = {"output_modalities": ["text"]}
BYTES_PER_MS = 48
# Of longer replies the sound cannot be retrieved.
RETRIEVABLE_MS = 14_000
TRIES = 6
# A ping every two seconds brings the stages' figures.
PINGED_S = 15
STARTED = "input_audio_buffer.speech_started"
STOPPED = "input_audio_buffer.speech_stopped"
DELTA = "response.output_audio.delta"
TRANSCRIPT = "response.output_audio_transcript.delta"
DONE = "response.done"
CUT = "conversation.item.truncated"


@pytest.fixture(scope="module", autouse=True)
def settled_figures(server) -> None:
    """What earlier tests did to the stages' counters has arrived."""
    time.sleep(3)


class Counts:
    """By how much the server's counters have grown since this was made."""

    def __init__(self, server: Server):
        self._server = server
        self._before = dict(self._now())

    def gateway(self, name: str) -> float:
        return self._grown(f"sglang_live_gateway_{name}")

    def thinker(self, what: str) -> float:
        labels = f'replica="0",stage="thinker",what="{what}"'
        return self._grown(f"sglang_live_stage_load{{{labels}}}")

    def check_cuts(self, n: int) -> None:
        """n replies were cut in the thinker's sessions, and no session was built anew."""
        wait_until(lambda: self.thinker("sessions_truncated") >= n, PINGED_S, f"{n} cuts")
        assert self.thinker("sessions_truncated") == n
        assert self.thinker("sessions_rebuilt") == 0
        assert self.thinker("truncations_refused") == 0

    def _grown(self, series: str) -> float:
        return dict(self._now()).get(series, 0.0) - self._before.get(series, 0.0)

    def _now(self) -> Iterator[tuple[str, float]]:
        for line in httpx.get(f"{self._server.http}/metrics", timeout=5).text.splitlines():
            if not line.startswith("#"):
                series, value = line.rsplit(" ", 1)
                yield series, float(value)


class UnsuitableAnswer(Exception):
    """Its length does not fit what the caller is about to do."""


def until_suitable(
    test: Callable[[Server], Awaitable[None]],
) -> Callable[[Server], Awaitable[None]]:
    @wraps(test)
    async def again(server: Server) -> None:
        for _ in range(TRIES):
            with suppress(UnsuitableAnswer):
                return await test(server)
        pytest.fail(f"{TRIES} answers were too short or too long")

    return again


def silence(seconds: float) -> np.ndarray:
    return np.zeros(int(24_000 * seconds), "<i2")


def voice() -> np.ndarray:
    """One sentence, with the silence that ends a turn."""
    return np.concatenate([clip_24k("sp_librivox_0880.flac"), silence(1.0)])


def burst() -> np.ndarray:
    """130 ms in the middle of a word: a voice for 96 ms, but not for the 250 of a barge-in."""
    vowel = clip_24k("sp_jfk.flac")[26_400:29_520]
    return np.concatenate([silence(0.2), vowel, silence(0.8)])


def click() -> np.ndarray:
    noise = np.random.default_rng(1).integers(-30_000, 30_000, 120).astype("<i2")
    return np.concatenate([silence(0.1), noise, silence(0.1)])


async def detection(socket: Socket, **settings) -> None:
    """Turns as by default, but for these settings; replies are text unless asked otherwise."""
    vad = {"type": "server_vad", **settings}
    updated = await socket.session(audio={"input": {"turn_detection": vad}}, **TEXT)
    assert updated["type"] == "session.updated"


async def request(socket: Socket, text: str, **response) -> None:
    content = [{"type": "input_text", "text": text}]
    item = {"type": "message", "role": "user", "content": content}
    await socket.send("conversation.item.create", item=item)
    await socket.send("response.create", response=response)


async def listen(socket: Socket, seconds: float) -> None:
    with suppress(TimeoutError):
        await socket.until(timeout_s=seconds)


async def long_answer(socket: Socket, heard_s: float) -> str:
    """Ask, and hear the first heard_s of the answer; the id of its item."""
    await request(socket, "tell me a long story", **GREEDY)
    first = await socket.until(DELTA)
    await listen(socket, heard_s)
    if any(e["type"] == DONE for e in since(socket, first)):
        raise UnsuitableAnswer
    return first["item_id"]


async def spoken_over(socket: Socket) -> tuple[dict, dict]:
    """speech_started and the response.done of the answer that this ends."""
    started = await socket.until(STARTED, DONE)
    if started["type"] == DONE:
        raise UnsuitableAnswer
    done = await socket.until(DONE)
    check_cancelled(done, "turn_detected")
    return started, done


async def cancelled(socket: Socket) -> dict:
    """The response.done of the answer, ended by the client."""
    await socket.send("response.cancel")
    done = await socket.until(DONE)
    if done["response"]["status"] == "completed":
        raise UnsuitableAnswer
    check_cancelled(done, "client_cancelled")
    return done


async def retrieve(socket: Socket, item_id: str) -> dict:
    await socket.send("conversation.item.retrieve", item_id=item_id)
    return (await socket.until("conversation.item.retrieved"))["item"]["content"][0]


async def truncate(socket: Socket, item_id: str, audio_end_ms: int) -> dict:
    fields = {"item_id": item_id, "content_index": 0, "audio_end_ms": audio_end_ms}
    await socket.send(CUT.removesuffix("d"), **fields)
    return await socket.until(CUT, "error")


def since(socket: Socket, event: dict) -> list[dict]:
    """What came after it."""
    ids = [e["event_id"] for e in socket.events]
    return socket.events[ids.index(event["event_id"]) + 1 :]


def of_item(socket: Socket, kind: str, item_id: str) -> list[dict]:
    return [e for e in socket.events if e["type"] == kind and e["item_id"] == item_id]


def received_ms(socket: Socket, item_id: str) -> float:
    deltas = (e["delta"] for e in of_item(socket, DELTA, item_id))
    return sum(len(base64.b64decode(delta)) for delta in deltas) / BYTES_PER_MS


def sound_ms(shown: dict) -> float:
    """Of a retrieved item."""
    return len(base64.b64decode(shown["audio"])) / BYTES_PER_MS


def said(socket: Socket, item_id: str) -> str:
    """The whole transcript as it was sent."""
    return "".join(e["delta"] for e in of_item(socket, TRANSCRIPT, item_id))


def check_cut(socket: Socket, item_id: str, shown: dict) -> None:
    """A retrieved reply is a beginning of what was sent, in sound and in words."""
    [cut] = of_item(socket, CUT, item_id)
    assert 0 < cut["audio_end_ms"] <= received_ms(socket, item_id)
    # Positions are told in whole milliseconds.
    assert sound_ms(shown) < cut["audio_end_ms"] + 1
    whole = said(socket, item_id)
    assert whole.startswith(shown["transcript"])
    assert len(shown["transcript"]) < len(whole)


def check_cancelled(done: dict, reason: str) -> None:
    response = done["response"]
    assert response["status"] == "cancelled"
    assert response["status_details"] == {"type": "cancelled", "reason": reason}


def held_tokens(done: dict) -> int:
    """What the session holds after this answer; its last token is prefilled with the next turn."""
    usage = done["response"]["usage"]
    return usage["input_tokens"] + usage["output_token_details"]["text_tokens"] - 1


def cached_tokens(done: dict) -> int:
    assert done["response"]["status"] == "completed"
    return done["response"]["usage"]["input_token_details"]["cached_tokens"]


@until_suitable
async def test_a_caller_who_speaks_over_an_answer_ends_it_and_is_answered(server):
    counts = Counts(server)
    async with connected(server.ws) as socket:
        first = await socket.ask("hello", **TEXT)
        item_id = await long_answer(socket, 1.5)
        speaking = asyncio.create_task(socket.speak(voice()))
        try:
            started, done = await spoken_over(socket)
            cut = await socket.until(CUT)
            after = await socket.until(DONE)
        finally:
            speaking.cancel()
        shown = await retrieve(socket, item_id)
        last = await socket.ask("and then", **TEXT)
    assert 0 <= started["audio_start_ms"] < 2000
    assert cut["item_id"] == item_id
    assert not [e for e in since(socket, done) if e.get("response_id") == done["response"]["id"]]
    check_cut(socket, item_id, shown)
    usage = after["response"]["usage"]
    assert usage["input_token_details"]["audio_tokens"] > 30
    assert cached_tokens(after) >= held_tokens(first)
    assert cached_tokens(last) >= held_tokens(after)
    assert counts.gateway("barge_ins_total") == 1
    counts.check_cuts(1)


@until_suitable
async def test_a_cough_over_an_answer_does_not_end_it(server):
    counts = Counts(server)
    async with connected(server.ws) as socket:
        await request(socket, "tell me a long story")
        await socket.until(DELTA)
        coughing = asyncio.create_task(socket.speak(np.concatenate([click(), burst()])))
        done = await socket.until(DONE)
        if not coughing.done():
            coughing.cancel()
            raise UnsuitableAnswer
    kinds = {event["type"] for event in socket.events}
    assert not kinds & {STARTED, CUT, "error"}
    assert counts.gateway("false_alarms_total") == 1
    assert counts.gateway("barge_ins_total") == 0
    assert done["response"]["status"] == "completed"
    # What was held back has come after all.
    audio_s = done["response"]["usage"]["output_token_details"]["audio_tokens"] / 12.5
    assert len(socket.audio()) / 24_000 == pytest.approx(audio_s, abs=0.1)


@until_suitable
async def test_without_a_window_the_same_cough_interrupts(server):
    counts = Counts(server)
    async with connected(server.ws) as socket:
        await detection(socket, confirm_ms=0)
        item_id = await long_answer(socket, 1.0)
        await socket.append(burst())
        await spoken_over(socket)
        cut = await socket.until(CUT)
        after = await socket.until(DONE)
    assert cut["item_id"] == item_id
    assert after["response"]["status"] == "completed"
    assert counts.gateway("barge_ins_total") == 1
    assert counts.gateway("false_alarms_total") == 0
    counts.check_cuts(1)


@until_suitable
async def test_with_interruption_off_the_answer_goes_on_and_the_new_turn_waits(server):
    counts = Counts(server)
    async with connected(server.ws) as socket:
        await detection(socket, interrupt_response=False)
        await request(socket, "tell me a long story", output_modalities=["audio"])
        await socket.until(DELTA)
        await socket.append(voice(), step=480)
        if (await socket.until(STOPPED, DONE))["type"] == DONE:
            raise UnsuitableAnswer
        first = await socket.until(DONE)
        created = await socket.until("response.created")
        second = await socket.until(DONE)
    kinds = [event["type"] for event in socket.events]
    assert STARTED in kinds
    assert CUT not in kinds
    assert kinds.index("response.created") < kinds.index(STARTED) < kinds.index(DONE)
    assert kinds.count("response.created") == kinds.count(DONE) == 2
    assert first["response"]["status"] == "completed"
    audio_s = first["response"]["usage"]["output_token_details"]["audio_tokens"] / 12.5
    assert len(socket.audio()) / 24_000 == pytest.approx(audio_s, abs=0.1)
    assert created["response"]["id"] == second["response"]["id"]
    assert second["response"]["usage"]["input_token_details"]["audio_tokens"] > 30
    assert cached_tokens(second) >= held_tokens(first)
    assert counts.gateway("barge_ins_total") == 0


@until_suitable
async def test_a_cancelled_answer_keeps_its_kv_and_can_be_cut(server):
    counts = Counts(server)
    async with connected(server.ws) as socket:
        first = await socket.ask("hello", **TEXT)
        item_id = await long_answer(socket, 1.0)
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
    check_cut(socket, item_id, shown)
    assert cached_tokens(after) >= held_tokens(first)
    assert cached_tokens(last) >= held_tokens(after)
    counts.check_cuts(1)


@until_suitable
async def test_a_cancelled_answer_that_nobody_cuts_counts_as_far_as_it_was_sent(server):
    counts = Counts(server)
    async with connected(server.ws) as socket:
        first = await socket.ask("hello", **TEXT)
        item_id = await long_answer(socket, 1.0)
        await cancelled(socket)
        after = await socket.ask("go on", **TEXT)
        shown = await retrieve(socket, item_id)
    assert CUT not in {event["type"] for event in socket.events}
    assert shown["transcript"]
    assert said(socket, item_id).startswith(shown["transcript"])
    assert sound_ms(shown) == received_ms(socket, item_id)
    assert cached_tokens(after) >= held_tokens(first)
    counts.check_cuts(1)


@until_suitable
async def test_a_finished_answer_can_be_cut_at_once_and_late(server):
    counts = Counts(server)
    async with connected(server.ws) as socket:
        first = await socket.ask("hello")
        item_id = first["response"]["output"][0]["id"]
        if received_ms(socket, item_id) > RETRIEVABLE_MS:
            raise UnsuitableAnswer
        whole = await retrieve(socket, item_id)
        too_long = await truncate(socket, item_id, int(received_ms(socket, item_id)) + 60_000)
        unchanged = await retrieve(socket, item_id)
        at_once = await truncate(socket, item_id, 500)
        shown = await retrieve(socket, item_id)
        second = await socket.ask("go on", **TEXT)
        counts.check_cuts(1)
        late = await truncate(socket, item_id, 200)
        shown_late = await retrieve(socket, item_id)
        third = await socket.ask("and then", **TEXT)
        fourth = await socket.ask("and now", **TEXT)
    assert too_long["error"]["param"] == "audio_end_ms"
    assert unchanged == whole
    assert whole["transcript"] == said(socket, item_id)
    assert (at_once["type"], at_once["audio_end_ms"]) == (CUT, 500)
    assert sound_ms(shown) == 500
    assert whole["transcript"].startswith(shown["transcript"])
    assert len(shown["transcript"]) < len(whole["transcript"])
    # All before the answer is kept, and nothing but its beginning is prefilled again.
    kept = first["response"]["usage"]["input_tokens"]
    assert cached_tokens(second) >= kept
    assert (late["type"], late["audio_end_ms"]) == (CUT, 200)
    assert sound_ms(shown_late) == 200
    assert shown["transcript"].startswith(shown_late["transcript"])
    # An older reply is not the end of the session any more: it is built anew, once.
    wait_until(lambda: counts.thinker("sessions_rebuilt") == 1, PINGED_S, "a session rebuilt")
    assert third["response"]["status"] == "completed"
    assert cached_tokens(fourth) >= held_tokens(third)


@until_suitable
async def test_a_listener_who_is_behind_is_believed(server):
    counts = Counts(server)
    async with connected(server.ws) as socket:
        await detection(socket)
        item_id = await long_answer(socket, 0.5)
        for _ in range(9):
            # Again and again the same: the listener has paused.
            await socket.send("playback.ack", item_id=item_id, audio_end_ms=200)
            await listen(socket, 0.25)
        await socket.send("playback.ack", item_id=item_id, audio_end_ms=200)
        await socket.append(voice(), step=480)
        await spoken_over(socket)
        cut = await socket.until(CUT)
        after = await socket.until(DONE)
        shown = await retrieve(socket, item_id)
    # By the clock it would be more than two seconds.
    assert 200 <= cut["audio_end_ms"] <= 1000
    check_cut(socket, item_id, shown)
    assert after["response"]["status"] == "completed"
    assert counts.gateway('playback_acks_total{outcome="accepted"}') == 1
    assert counts.gateway('playback_acks_total{outcome="duplicate"}') == 9
    counts.check_cuts(1)


@until_suitable
async def test_lying_acks_are_clamped_and_unknown_items_refused(server):
    counts = Counts(server)
    async with connected(server.ws) as socket:
        await detection(socket)
        item_id = await long_answer(socket, 1.0)
        for lie_ms in (10_000_000, 0, 10_000_000):
            await socket.send("playback.ack", item_id=item_id, audio_end_ms=lie_ms)
        await socket.send("playback.ack", item_id="item_of_nobody", audio_end_ms=100)
        refused = await socket.until("error")
        # The answer goes on.
        for _ in range(3):
            if (await socket.until(DELTA, DONE))["type"] == DONE:
                raise UnsuitableAnswer
        await socket.append(voice(), step=480)
        await spoken_over(socket)
        after = await socket.until(DONE)
        shown = await retrieve(socket, item_id)
    assert refused["error"]["code"] == "item_ack_invalid_item_id"
    sent_ms = received_ms(socket, item_id)
    assert all(e["audio_end_ms"] <= sent_ms for e in of_item(socket, CUT, item_id))
    assert sound_ms(shown) <= sent_ms
    assert said(socket, item_id).startswith(shown["transcript"])
    assert after["response"]["status"] == "completed"
    assert counts.gateway('playback_acks_total{outcome="beyond_sent"}') == 2
    assert counts.gateway('errors_total{code="item_ack_invalid_item_id"}') == 1
    counts.check_cuts(1)


def test_everything_is_free_again_when_the_callers_have_gone(server):
    server.wait_until_free()
    log = (server.log_dir / "server.log").read_text()
    for trouble in ("turn_crashed", "turns_stuck", "turn_not_interrupted"):
        assert trouble not in log
