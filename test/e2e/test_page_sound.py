"""The page's microphone, playback, truncations and acks, with a scripted gateway."""

import asyncio
import re

import numpy as np
import pytest

from sglang_live.core import TranscriptDelta
from sglang_live.errors import StageUnavailableError
from sglang_live.interaction.silero import SileroModel
from test.e2e.browser import microphone, microphone_of
from test.e2e.scripted_page import (
    CLICKS_ARE_NOT_NEEDED,
    ask,
    frames_of,
    page_of,
    says,
    status,
)
from test.unit.gateway.fakes import FakeOrchestrator, app_of, done, spoken

pytestmark = [pytest.mark.e2e]

_APPEND = "input_audio_buffer.append"
_ASKED = ("response.create", "response.cancel")
# A device with a latency of 400 ms, and a count of the samples that the page has passed to it.
_LATE = """
Object.defineProperty(AudioContext.prototype, "outputLatency", { value: 0.4 });
window.rendered = 0;
const take = Object.getOwnPropertyDescriptor(MessagePort.prototype, "onmessage").set;
Object.defineProperty(MessagePort.prototype, "onmessage", {
  set(then) {
    take.call(this, (event) => {
      if (event.data.samples) window.rendered = event.data.samples;
      then(event);
    });
  },
});
"""
_RENDERED_AT_CUT = """() => {
  document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
  return rendered / 24000;
}"""


async def test_a_user_who_denies_the_microphone_gets_advice_and_can_type():
    denied = ("--use-fake-device-for-media-stream", "--deny-permission-prompts")
    flags = (CLICKS_ARE_NOT_NEEDED, *denied)
    async with page_of(app_of(FakeOrchestrator([spoken("Yes.", 800)])), flags=flags) as client:
        await client.page.click("#talk")
        await client.page.wait_for_selector("#transcript .note")
        [told] = await client.lines("page")
        assert "does not give this page the microphone: allow it" in told
        await ask(client, "Is anyone there?")
        await client.until(client.is_heard, "there is a response")
        assert client.complaints == []


async def test_the_recorded_question_can_be_sent_while_muted(tmp_path):
    orchestrator = FakeOrchestrator([spoken("Yes.", 800)])
    app = app_of(orchestrator, speech_model=SileroModel())
    # The microphone's sound comes long after the response to the recording.
    sound = microphone(tmp_path / "said.wav", "sp_librivox_0880.flac", before_s=60)
    async with page_of(app, sound) as client:
        await client.page.click("#talk")
        await client.page.click("#mute")
        assert await client.page.get_attribute("#mute", "aria-pressed") == "true"
        await client.page.click("#clip")
        await client.until(client.is_heard, "the recording gets a response")
        [said] = await client.lines("you")
        assert "spoke for" in said


async def test_a_short_hum_softens_the_response_and_is_noted(tmp_path):
    orchestrator = FakeOrchestrator([spoken("A long story.", 20_000)])
    hum = 12_000 * np.sin(2 * np.pi * 200 * np.arange(24_000 * 0.35) / 24_000)
    sound = microphone_of(tmp_path / "hum.wav", hum, before_s=5.0)
    async with page_of(app_of(orchestrator), sound) as client:
        received = frames_of(client)
        await client.page.click("#talk")
        await status(client, "connected")
        await ask(client, "Tell me a story.")
        await client.page.wait_for_selector("#transcript .note", timeout=20_000)
        [story] = await client.lines("model")
        assert re.search(r"backchannel ignored \(\d+ ms, short\)", story)
        kinds = [event["type"] for event in received]
        assert "input_audio_buffer.voice_suspected" in kinds
        assert "input_audio_buffer.speech_started" not in kinds
        assert client.complaints == []


async def test_a_muted_microphone_sends_silence(tmp_path):
    orchestrator = FakeOrchestrator([spoken("Yes.", 800)])
    app = app_of(orchestrator, speech_model=SileroModel())
    sound = microphone(tmp_path / "said.wav", "sp_librivox_0880.flac", before_s=3)
    async with page_of(app, sound) as client:
        sent = frames_of(client)
        await client.page.click("#talk")
        await client.page.click("#mute")

        async def was_past() -> bool:  # the sound's end, in blocks of 20 ms
            return len([frame for frame in sent if frame["type"] == _APPEND]) > 50 * 8

        await client.until(was_past, "the microphone's sound is over")
        assert await client.lines("you") == []
        assert client.complaints == []


async def test_no_audio_is_sent_before_the_server_confirms_the_settings():
    orchestrator = FakeOrchestrator([spoken("Yes.", 800)])
    app = app_of(orchestrator, speech_model=SileroModel())
    async with page_of(app) as client:
        frames = frames_of(client)
        await client.page.click("#clip")
        await client.until(client.is_heard, "the recording gets a response")
        told = [frame["type"] for frame in frames]
        assert told.index(_APPEND) > told.index("session.updated")
        [said] = orchestrator.turns[0].history
        # The recording's beginning was sent: 1.7 s of voice, and the silence that ends a turn.
        assert said.parts[0].duration_s > 1.9


async def test_acks_and_truncations_subtract_the_latency_of_the_device():
    orchestrator = FakeOrchestrator([spoken("Long.", 8000)])
    async with page_of(app_of(orchestrator), script=_LATE) as client:
        frames = frames_of(client)
        await ask(client, "Tell me a story.")

        def told(kind: str) -> list[float]:
            return [frame["audio_end_ms"] / 1000 for frame in frames if frame["type"] == kind]

        async def is_acked() -> bool:
            return bool(told("playback.ack"))

        await client.until(is_acked, "the page has sent an ack")
        assert int((await client.text("#ttfp")).split()[0]) >= 400
        rendered_s = await client.page.evaluate(_RENDERED_AT_CUT)

        async def is_cut() -> bool:
            return (
                bool(told("conversation.item.truncate")) and await client.seconds("discarded") > 4
            )

        await client.until(is_cut, "the rest is discarded, and reported to the server")
        heard_s = await client.seconds("heard")
        assert told("conversation.item.truncate") == [pytest.approx(heard_s, abs=0.06)]
        assert max(told("playback.ack")) <= heard_s + 0.06
        assert heard_s < rendered_s - 0.3


async def test_escape_while_connecting_has_no_effect():
    async with page_of(app_of(FakeOrchestrator([spoken("Yes.", 800)]))) as client:
        page = client.page
        held: asyncio.Queue = asyncio.Queue()
        await page.route("**/v1/models", lambda route: held.put_nowait(route))
        await ask(client, "Is anyone there?")
        route = await held.get()
        await page.keyboard.press("Escape")
        assert await client.text("#status") == "connecting"
        await route.continue_()
        await client.until(client.is_heard, "the typed text gets a response")
        assert client.complaints == []


async def test_after_two_typed_questions_at_once_only_the_last_response_is_played():
    orchestrator = FakeOrchestrator([spoken("Yes.", 800), spoken("Yes.", 800)])
    async with page_of(app_of(orchestrator)) as client:
        frames = frames_of(client)
        await client.page.click("#talk")
        await status(client, "connected to")
        await client.page.evaluate(
            """async () => {
              for (const text of ["one", "two"]) {
                document.getElementById("text").value = text;
                document.getElementById("text-form").requestSubmit();
                for (let n = 0; n < 20; n++) await null; // nothing comes from a network meanwhile
              }
            }"""
        )

        async def is_heard_whole() -> bool:
            return await client.seconds("heard") == pytest.approx(0.8, abs=0.05)

        await client.until(is_heard_whole, "one whole response is heard")
        kinds = [frame["type"] for frame in frames if frame["type"] in _ASKED]
        assert kinds == ["response.create", "response.cancel", "response.create"]
        whole = [frame["response"] for frame in frames if frame["type"] == "response.done"][-1]
        assert (len(orchestrator.sessions), whole["status"]) == (1, "completed")
        assert await client.seconds("discarded") == 0
        assert await client.lines("server") == []


async def test_stopping_twice_is_no_error_and_the_next_response_is_played():
    orchestrator = FakeOrchestrator([spoken("First.", 4000), spoken("Second.", 800)])
    async with page_of(app_of(orchestrator)) as client:
        await ask(client, "one")
        await client.until(client.is_heard, "the first is heard")
        await client.page.evaluate(
            """() => {
              for (const _ of "twice") {
                document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
              }
            }"""
        )

        async def is_cut() -> bool:
            return await client.seconds("discarded") > 1

        await client.until(is_cut, "the rest of it is discarded")
        await ask(client, "two")
        await says(client, "Second.")
        await client.until(client.is_over, "and heard")
        assert await client.seconds("heard") == pytest.approx(0.8, abs=0.05)
        assert await client.lines("server") == []


async def test_the_users_transcript_grows_in_deltas_and_is_then_complete():
    pieces = [TranscriptDelta("Is it"), TranscriptDelta(" raining"), done("Is it raining?")]
    orchestrator = FakeOrchestrator([spoken("Yes.", 800), pieces])
    async with page_of(app_of(orchestrator, speech_model=SileroModel())) as client:
        await client.page.click("#clip")

        async def is_written() -> bool:
            return any(": Is it raining" in line for line in await client.lines("you"))

        await client.until(is_written, "it is written down")
        await client.until(client.is_over, "the response is over")
        [said] = await client.lines("you")
        assert re.search(r"spoke for \d+\.\d s: Is it raining$", said), said


async def test_a_failed_transcription_is_shown():
    failing = [StageUnavailableError("no thinker now")]
    orchestrator = FakeOrchestrator([spoken("Yes.", 800), failing])
    async with page_of(app_of(orchestrator, speech_model=SileroModel())) as client:
        await client.page.click("#clip")
        await client.page.wait_for_selector("#transcript .note")
        [said] = await client.lines("you")
        assert "not transcribed: no thinker now" in said


async def test_a_suspended_audio_device_resumes_during_the_session():
    orchestrator = FakeOrchestrator([spoken("First.", 800), spoken("Second.", 800)])
    async with page_of(app_of(orchestrator)) as client:
        await ask(client, "one")
        await client.until(client.is_over, "the first is heard")
        await client.page.evaluate("kept.contexts[0].suspend()")
        await ask(client, "two")
        await says(client, "Second.")
        await client.until(client.is_over, "the second is heard as well")
        assert await client.seconds("heard") == pytest.approx(0.8, abs=0.05)
        assert client.complaints == []


async def test_an_unplugged_microphone_is_shown(tmp_path):
    sound = microphone(tmp_path / "said.wav", "sp_librivox_0880.flac", before_s=60)
    async with page_of(app_of(FakeOrchestrator()), sound) as client:
        await client.page.click("#talk")

        async def has_microphone() -> bool:
            return await client.page.evaluate("kept.tracks.length > 0")

        await client.until(has_microphone, "the browser gives a microphone")
        await client.page.evaluate("kept.tracks[0].dispatchEvent(new Event('ended'))")
        await client.page.wait_for_selector("#transcript .note")
        [told] = await client.lines("page")
        assert "The microphone is gone" in told
