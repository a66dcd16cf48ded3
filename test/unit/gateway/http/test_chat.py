"""Chat completions that are spoken."""

import asyncio
import base64
import io
import json
import threading

import httpx
import numpy as np
import pytest
import soundfile as sf
from openai import AsyncOpenAI
from PIL import Image

from sglang_live.core import (
    OUTPUT_RATE_HZ,
    AudioDelta,
    AudioPart,
    TextPart,
    TranscriptDelta,
    VideoPart,
)
from sglang_live.errors import StageUnavailableError
from sglang_live.gateway.http import chat
from test.pictures import noise, uri_of
from test.unit.gateway.fakes import MODEL, FakeOrchestrator, app_of, done, full, spoken, tone
from test.unit.gateway.live_server import listening
from test.videos import film, grey, noise_video, numbers, video_uri

PATH = "/v1/chat/completions"
HELLO = {"role": "user", "content": "Hello."}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string"}},
            "required": ["town"],
        },
    },
}
CALL = '{"name": "weather", "arguments": {"town": "Rome"}}'


async def ask(orchestrator: FakeOrchestrator, *messages: dict, **fields) -> httpx.Response:
    body = {
        "messages": list(messages) or [HELLO],
        "modalities": ["text", "audio"],
        "audio": {"voice": "bob", "format": "wav"},
        **fields,
    }
    transport = httpx.ASGITransport(app_of(orchestrator))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        return await http.post(PATH, json=body)


def chunks_of(response: httpx.Response) -> list[dict]:
    lines = [line[6:] for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def written(text: str) -> list:
    return [TranscriptDelta(text), done(text)]


def clip(seconds: float = 0.5) -> str:
    file = io.BytesIO()
    sf.write(file, np.zeros(round(seconds * 8000)), 8000, format="WAV")
    return base64.b64encode(file.getvalue()).decode()


async def test_a_completion_has_a_file_and_its_transcript():
    orchestrator = FakeOrchestrator([spoken("Good morning.", 800)])
    body = (await ask(orchestrator)).json()
    assert (body["object"], body["model"]) == ("chat.completion", MODEL)
    [choice] = body["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] is None
    audio = choice["message"]["audio"]
    assert audio["transcript"] == "Good morning."
    data = base64.b64decode(audio["data"])
    assert np.frombuffer(data[44:], "<i2").tobytes() == tone(80) * 10
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert orchestrator.session.n_closed == 1


@pytest.mark.parametrize("name", ["mp3", "opus", "flac"])
async def test_other_formats_decode_to_the_same_duration(name):
    response = await ask(
        FakeOrchestrator([spoken("Hi.", 800)]), audio={"voice": "bob", "format": name}
    )
    data = base64.b64decode(response.json()["choices"][0]["message"]["audio"]["data"])
    with sf.SoundFile(io.BytesIO(data)) as file:
        assert len(file.read(60 * OUTPUT_RATE_HZ)) / OUTPUT_RATE_HZ == pytest.approx(0.8, abs=0.15)


async def test_chunks_have_words_and_audio_as_they_arrive():
    orchestrator = FakeOrchestrator([spoken("Good morning.", 160)])
    response = await ask(
        orchestrator,
        stream=True,
        stream_options={"include_usage": True},
        audio={"voice": "bob", "format": "pcm16"},
    )
    chunks = chunks_of(response)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0]["role"] == "assistant"
    audio = [delta["audio"] for delta in deltas if "audio" in delta]
    assert len({part["id"] for part in audio}) == 1
    assert "".join(part.get("transcript", "") for part in audio) == "Good morning."
    pcm = b"".join(base64.b64decode(part["data"]) for part in audio if "data" in part)
    assert pcm == tone(80) * 2
    assert "expires_at" in audio[-1]
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 3)


async def test_without_sglangs_own_api_answers_are_written_as_well():
    orchestrator = FakeOrchestrator([written("Good morning."), written("Good morning.")])
    body = (await ask(orchestrator, modalities=["text"])).json()
    assert body["choices"][0]["message"]["content"] == "Good morning."
    assert "audio" not in body["choices"][0]["message"]
    assert not orchestrator.turns[0].wants_audio
    chunks = chunks_of(await ask(orchestrator, modalities=["text"], audio=None, stream=True))
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
    assert text == "Good morning."


HEARD = [{"type": "input_audio", "input_audio": {"data": clip(), "format": "wav"}}]


@pytest.mark.parametrize(
    ("content", "recognises", "is_turn"),
    [("Hi.", True, False), (HEARD, True, True), (HEARD, False, False)],
)
async def test_sound_for_a_model_that_only_reads_is_recognised(content, recognises, is_turn):
    """Of chats in writing; SGLang's own route, which has no recogniser, serves the others."""
    orchestrator = FakeOrchestrator([written("Good morning.")])
    app = app_of(orchestrator, native_url="http://127.0.0.1:9", recognises=recognises)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        messages = [HELLO, {"role": "user", "content": content}]
        response = await http.post(PATH, json={"messages": messages})
    assert response.status_code == (200 if is_turn else 503)


async def test_the_model_sees_the_conversation():
    orchestrator = FakeOrchestrator()
    audio = {"type": "input_audio", "input_audio": {"data": clip(), "format": "wav"}}
    await ask(
        orchestrator,
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [{"type": "text", "text": "And kind."}]},
        {"role": "user", "content": [{"type": "text", "text": "Listen:"}, audio]},
        {"role": "assistant", "content": "I do."},
        {"role": "user", "content": "Well?"},
        max_completion_tokens=50,
        temperature=0.3,
        seed=7,
    )
    [turn] = orchestrator.turns
    assert turn.instructions == "Be brief.\n\nAnd kind."
    assert [item.role for item in turn.history] == ["user", "assistant", "user"]
    text, heard = turn.history[0].parts
    assert isinstance(text, TextPart) and isinstance(heard, AudioPart)
    assert heard.duration_s == pytest.approx(0.5)
    assert (turn.voice, turn.max_output_tokens, turn.temperature) == ("bob", 50, 0.3)
    assert turn.stateless and turn.wants_audio and turn.seed == 7


async def test_an_answer_can_be_referred_to_by_its_id():
    orchestrator = FakeOrchestrator([spoken("I am Ada."), spoken("Ada.")])
    async with listening(app_of(orchestrator)) as address:
        client = AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0)

        async def say(*messages):
            return await client.chat.completions.create(
                model=MODEL,
                messages=list(messages),
                modalities=["text", "audio"],
                audio={"voice": "alloy", "format": "wav"},
            )

        first = await say(HELLO)
        audio = first.choices[0].message.audio
        earlier = {"role": "assistant", "audio": {"id": audio.id}}
        await say(HELLO, earlier, {"role": "user", "content": "Who?"})
    history = orchestrator.turns[0].history
    assert [part.text for item in history for part in item.parts] == ["Hello.", "I am Ada.", "Who?"]
    assert orchestrator.turns[0].voice == "ada", "a voice of others is the model's first"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([{"role": "user", "content": "x" * 4001}], {}, "messages"),
        ([{"role": "user", "content": "x" * 3000}] * 2, {}, "messages"),
        ([{"role": "system", "content": "x" * 3500}, HELLO], {}, "messages"),
        ([{"role": "system", "content": "x" * 2500}, *[HELLO] * 300], {}, "messages"),
        ([HELLO], {"tools": [WEATHER]}, "tools"),
    ],
)
async def test_what_cannot_fit_into_the_context_is_no_turn(messages, fields, param, stream):
    if "tools" in fields:
        function = WEATHER["function"] | {"description": "x" * 3500}
        fields = {"tools": [WEATHER | {"function": function}]}
    orchestrator = FakeOrchestrator(most_tokens=4000)
    audio = {"voice": "bob", "format": "pcm16"}
    response = await ask(orchestrator, *messages, stream=stream, audio=audio, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert orchestrator.sessions == []
    assert (await ask(orchestrator, HELLO)).status_code == 200


async def test_more_text_than_is_worth_a_look_is_not_measured():
    orchestrator = FakeOrchestrator()
    half = {"role": "user", "content": "x" * ((1 << 19) + 1)}
    response = await ask(orchestrator, half, half)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (
        400,
        "text_too_large",
        "messages",
    )
    assert orchestrator.measured == []


async def test_a_call_is_checked_and_not_spoken():
    script = [
        TranscriptDelta("One moment."),
        done("One moment.", function_calls=(CALL, '{"name": "x"}')),
    ]
    orchestrator = FakeOrchestrator([script, script])
    body = (await ask(orchestrator, tools=[WEATHER], tool_choice="auto")).json()
    [choice] = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"town":"Rome"}'}
    audio = {"voice": "bob", "format": "pcm16"}
    response = await ask(orchestrator, tools=[WEATHER], stream=True, audio=audio)
    calls = [c["choices"][0]["delta"].get("tool_calls") for c in chunks_of(response)]
    [[call]] = [c for c in calls if c]
    assert (call["index"], call["function"]["name"]) == (0, "weather")


async def test_the_output_of_a_function_is_part_of_the_history():
    orchestrator = FakeOrchestrator()
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    await ask(
        orchestrator,
        HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Rain."},
        tools=[WEATHER],
    )
    roles = [item.role for item in orchestrator.turns[0].history]
    assert roles == ["user", "assistant", "tool"]
    assert "<tool_call>" in orchestrator.turns[0].history[1].parts[0].text


@pytest.mark.parametrize(
    ("messages", "fields", "status", "message"),
    [
        ([{"role": "system", "content": "x"}], {}, 400, "no message to respond to"),
        ([{"role": "user", "content": ""}], {}, 400, "messages[0] is empty"),
        ([{"role": "pirate", "content": "x"}], {}, 400, "role"),
        ([{"role": "assistant", "audio": {"id": "audio_0"}}], {}, 400, "audio_0"),
        ([], {"model": "gpt-5"}, 404, MODEL),
        ([], {"n": 2}, 400, "$.n"),
        ([], {"stream": True, "audio": {"voice": "bob", "format": "mp3"}}, 400, "pcm16"),
        ([], {"audio": {"voice": "bob", "format": "amr"}}, 400, "format"),
        ([], {"max_tokens": 0}, 400, "max_tokens"),
        ([], {"tool_choice": "any"}, 400, "tool_choice"),
        (
            [],
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            400,
            "no function 'x'",
        ),
        (
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "!"}}]}],
            {},
            400,
            "base64",
        ),
        (
            [{"role": "system", "content": [{"type": "input_audio", "input_audio": {"data": ""}}]}],
            {},
            400,
            "cannot hold audio",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            {},
            400,
            "image_url",
        ),
    ],
)
async def test_an_invalid_request_is_refused(messages, fields, status, message):
    orchestrator = FakeOrchestrator()
    response = await ask(orchestrator, *messages, **fields)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]
    assert orchestrator.sessions == []


async def test_a_full_or_failed_server_reports_an_error():
    response = await ask(FakeOrchestrator(refuse_with=full()))
    assert (response.status_code, response.headers["retry-after"]) == (503, "3")
    failing = FakeOrchestrator([[StageUnavailableError("talker/0 is down")]])
    response = await ask(failing, stream=True, audio={"voice": "bob", "format": "pcm16"})
    assert response.json()["error"]["code"] == "stage_unavailable"
    assert failing.session.n_closed == 1


async def test_a_failure_during_a_completion_is_an_error_in_the_stream():
    failing = FakeOrchestrator([[TranscriptDelta("Well"), StageUnavailableError("talker/0 died")]])
    response = await ask(failing, stream=True, audio={"voice": "bob", "format": "pcm16"})
    first, *_, last = (json.loads(line[6:]) for line in response.text.splitlines() if line)
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert last["error"]["code"] == "stage_unavailable"
    assert "[DONE]" not in response.text
    assert failing.session.n_closed == 1


async def test_a_client_that_leaves_ends_its_turn():
    orchestrator = FakeOrchestrator([[TranscriptDelta("Good "), asyncio.Event()]])
    body = {"messages": [HELLO], "modalities": ["text", "audio"]}
    async with listening(app_of(orchestrator)) as address:
        async with httpx.AsyncClient(base_url=f"http://{address}") as http:
            asking = asyncio.create_task(http.post(PATH, json=body))
            async with asyncio.timeout(30):
                while not orchestrator.sessions or not orchestrator.session.turns:
                    await asyncio.sleep(0.01)
            asking.cancel()
        await asyncio.wait_for(orchestrator.session.closed.wait(), 30)
    assert orchestrator.session.n_cancelled == 1


async def test_the_audio_of_all_messages_together_is_bounded():
    audio = {"type": "input_audio", "input_audio": {"data": clip(250), "format": "wav"}}
    message = {"role": "user", "content": [audio]}
    orchestrator = FakeOrchestrator([spoken("Long.", 80)])
    assert (await ask(orchestrator, message, message)).status_code == 200
    response = await ask(FakeOrchestrator(), message, message, message)
    assert response.status_code == 400
    assert "longer than" in response.json()["error"]["message"]


async def test_a_malformed_function_call_alone_is_the_text_of_a_completion():
    end = done("", function_calls=("{",))
    [choice] = (await ask(FakeOrchestrator([[end]]), tools=[WEATHER])).json()["choices"]
    assert choice["message"]["content"] == "{" and choice["finish_reason"] == "stop"
    fields = {"stream": True, "audio": {"format": "pcm16"}}
    streamed = await ask(FakeOrchestrator([[end]]), tools=[WEATHER], **fields)
    assert '"content":"{"' in streamed.text and "[DONE]" in streamed.text
    words = await ask(FakeOrchestrator([[TranscriptDelta("Well."), end]]), tools=[WEATHER])
    assert words.status_code == 200


async def test_a_function_call_that_is_cut_ends_a_completion_by_its_length():
    end = done("", status="incomplete", reason="max_output_tokens", function_calls=('{"name',))
    [choice] = (await ask(FakeOrchestrator([[end]]), tools=[WEATHER])).json()["choices"]
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]


async def test_a_function_call_has_one_output():
    asked = {"role": "user", "content": "Hi"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calls = {"role": "assistant", "tool_calls": [call]}
    output = {"role": "tool", "tool_call_id": "c", "content": "1"}
    twice = await ask(FakeOrchestrator(), asked, calls, output, output)
    assert twice.status_code == 400
    assert twice.json()["error"]["param"] == "messages[3].tool_call_id"
    again = await ask(FakeOrchestrator([spoken("Hi.")]), asked, calls, output, calls, output)
    assert again.status_code == 200


async def test_files_are_encoded_outside_the_event_loop(monkeypatch):
    """A minute of mp3 takes half a second, which would delay the audio of all sessions."""
    threads = []
    file = chat._Completion.file

    def watched(response):
        threads.append(threading.current_thread())
        return file(response)

    monkeypatch.setattr(chat._Completion, "file", watched)
    assert (await ask(FakeOrchestrator(), audio={"format": "mp3"})).status_code == 200
    assert threads and threading.main_thread() not in threads


async def test_a_line_break_in_a_functions_name_does_not_break_a_log_line(caplog):
    name = "weather\nERROR forged"
    tool = {"type": "function", "function": {**WEATHER["function"], "name": name}}
    refused = await ask(FakeOrchestrator(), tools=[tool])
    assert refused.json()["error"]["param"] == "tools[0].function.name"
    # A model may write a name that no client may declare.
    end = done("", function_calls=(json.dumps({"name": name, "arguments": {"city": 5}}),))
    await ask(FakeOrchestrator([[end]]), tools=[WEATHER])
    lines = [record.getMessage() for record in caplog.records]
    [logged] = [line for line in lines if line.startswith("tool_call_malformed")]
    assert "forged" in logged
    assert not any("\n" in line for line in lines)


# --- the form of Qwen's clients ---


def data_uri(kind: str = "") -> str:
    return f"data:{kind};base64," + base64.b64encode(written_wav()).decode()


def written_wav() -> bytes:
    file = io.BytesIO()
    sf.write(file, np.frombuffer(tone(500), "<i2"), 24_000, format="WAV", subtype="PCM_16")
    return file.getvalue()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": data_uri(), "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": data_uri("audio/wav")}},
    ],
)
async def test_audio_may_be_a_data_uri(part):
    orchestrator = FakeOrchestrator([spoken("Yes.")])
    message = {"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}
    assert (await ask(orchestrator, message)).status_code == 200
    audio, text = orchestrator.turns[0].history[0].parts
    assert audio.duration_s == pytest.approx(0.5, abs=0.01) and text.text == "What is it?"


async def test_audio_of_another_server_is_not_fetched():
    part = {"type": "audio_url", "audio_url": {"url": "https://example.org/a.wav"}}
    response = await ask(FakeOrchestrator(), {"role": "user", "content": [part]})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == "messages[0].content[0].audio_url.url"


@pytest.mark.parametrize("n_bytes", [2, 4, 958, 960, 962])
async def test_all_pieces_of_a_streamed_wav_are_decoded_as_one_text(n_bytes):
    whole = tone(200)
    pieces = [whole[at : at + n_bytes] for at in range(0, len(whole), n_bytes)]
    script = [TranscriptDelta("Yes."), *map(AudioDelta, pieces), done("Yes.")]
    audio = {"voice": "bob", "format": "wav"}
    chunks = chunks_of(await ask(FakeOrchestrator([script]), stream=True, audio=audio))
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."
    text = "".join(delta["audio"]["data"] for delta in deltas if delta.get("audio"))
    assert base64.b64decode(text) == whole


async def test_thinking_is_switched_by_its_name_alone():
    response = await ask(FakeOrchestrator([spoken("Yes.")]), enable_thinking=False)
    assert response.status_code == 200
    response = await ask(FakeOrchestrator([spoken("Yes.")]), enable_thinking=True)
    assert response.json()["error"]["param"] == "enable_thinking"


# --- pictures ---


async def look(url: str, sees: bool = True, **fields) -> tuple[FakeOrchestrator, httpx.Response]:
    orchestrator = FakeOrchestrator([spoken("A lamp.", 80)])
    body = {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": fields}]}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "bob", "format": "wav"},
    }
    fields["url"] = url
    transport = httpx.ASGITransport(app_of(orchestrator, sees=sees))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        return orchestrator, await http.post(PATH, json=body)


async def test_a_spoken_answer_sees_pictures():
    orchestrator, response = await look(uri_of(noise(64, 32)), detail="low")
    [item] = orchestrator.turns[0].history
    assert (item.parts[0].width, item.parts[0].height) == (64, 32)
    assert response.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 0


@pytest.mark.parametrize(
    ("url", "sees", "code", "why"),
    [
        ("https://example.com/a.png", True, "invalid_value", "fetches no pictures"),
        ("data:image/png;base64,AAAA", True, "invalid_picture", "no picture"),
        ("data:image/webp;base64,AAAA", True, "invalid_value", "image/webp"),
        (uri_of(noise(8, 8)), False, "unsupported_content_type", "image_url is not supported"),
    ],
)
async def test_a_bad_picture_is_refused_with_its_place(url, sees, code, why):
    _, response = await look(url, sees)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, code)
    assert error["param"].startswith("messages[0].content[0].") and why in error["message"]


# --- videos ---


async def watch(*urls: str, watches: bool = True, detail: str = "auto") -> tuple:
    parts = [{"type": "video_url", "video_url": {"url": u, "detail": detail}} for u in urls]
    return await watch_parts(*parts, watches=watches)


async def watch_parts(*parts: dict, watches: bool = True) -> tuple:
    orchestrator = FakeOrchestrator([spoken("A lamp.", 80)])
    body = {
        "messages": [{"role": "user", "content": list(parts)}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "bob", "format": "wav"},
    }
    transport = httpx.ASGITransport(app_of(orchestrator, sees=True, watches=watches))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        return orchestrator, await http.post(PATH, json=body)


@pytest.mark.parametrize("kind", ["video/mp4", "", "application/octet-stream"])
async def test_a_spoken_answer_watches_videos(kind):
    orchestrator, response = await watch(video_uri(film(grey(20)), kind))
    [item] = orchestrator.turns[0].history
    assert numbers(item.parts[0].frames) == [0, 5, 10, 15]
    assert response.json()["usage"]["prompt_tokens_details"]["video_tokens"] == 0


FILM = video_uri(film(grey(20)))
MINUTE = video_uri(film(grey(50, 16, 16), 1))


@pytest.mark.parametrize(
    ("urls", "watches", "code", "why"),
    [
        (["https://example.com/a.mp4"], True, "invalid_value", "fetches nothing"),
        (["file:///etc/passwd"], True, "invalid_value", "fetches nothing"),
        (["data:video/mp4;base64,AAA"], True, "invalid_value", "not base64"),
        (["data:video/mp4;base64,AAAA"], True, "invalid_video", "no video"),
        ([FILM] * 5, True, "invalid_value", "At most 4 videos"),
        ([MINUTE] * 3, True, "invalid_video", "longer than 20 s"),
        ([FILM], False, "unsupported_content_type", "video_url is not supported"),
    ],
)
async def test_a_bad_video_is_refused_with_its_place(urls, watches, code, why):
    orchestrator, response = await watch(*urls, watches=watches)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, code), error
    assert error["param"].startswith(f"messages[0].content[{len(urls) - 1}].")
    assert why in error["message"] and not orchestrator.sessions


PAGES = [uri_of(Image.fromarray(frame)) for frame in grey(4)]


@pytest.mark.parametrize(
    ("fps", "seen"),
    [({}, [0, 1, 2, 3]), ({"fps": None}, [0, 1, 2, 3]), ({"fps": 4}, [0, 2]), ({"fps": 1.0}, None)],
)
async def test_a_video_may_be_a_list_of_pictures(fps, seen):
    orchestrator, response = await watch_parts({"type": "video", "video": PAGES, **fps})
    assert response.status_code == 200, response.text
    [item] = orchestrator.turns[0].history
    assert numbers(item.parts[0].frames) == (seen or [0, 0, 1, 1, 2, 2, 3, 3])


@pytest.mark.parametrize(
    ("video", "fields", "code", "at", "why"),
    [
        (["https://example.com/1.jpg"], {}, "invalid_value", ".video[0]", "fetches no pictures"),
        ([PAGES[0], "file:///a.png"], {}, "invalid_value", ".video[1]", "data URI"),
        ([PAGES[0], "data:image/png;base64,AAA"], {}, "invalid_value", ".video[1]", "not base64"),
        ([PAGES[0], "data:image/png;base64,AAAA"], {}, "invalid_video", ".video", "Picture 1: "),
        ([*PAGES, uri_of(noise(8, 8))], {}, "invalid_video", ".video", "Picture 4 has another"),
        (PAGES * 61, {}, "invalid_video", ".video", "longer than 120 s"),
        (PAGES * 4, {"fps": 0.1}, "invalid_video", ".video", "longer than 120 s"),
        (PAGES, {"fps": 0}, "invalid_value", ".fps", ">= 0.1"),
        (PAGES, {"fps": "2"}, "invalid_type", ".fps", "str"),
        (PAGES, {"max_pixels": 4096}, "unknown_parameter", ".max_pixels", "max_pixels"),
        ([], {}, "invalid_value", ".video", "length >= 1"),
        ("https://example.com/a.mp4", {}, "invalid_type", ".video", "array"),
    ],
)
async def test_a_bad_list_of_pictures_is_refused_with_its_place(video, fields, code, at, why):
    good = {"type": "text", "text": "Look."}
    orchestrator, response = await watch_parts(good, {"type": "video", "video": video, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, code), error
    assert error["param"] == f"messages[0].content[1]{at}"
    assert why in error["message"] and not orchestrator.sessions


async def test_lists_of_pictures_share_the_bounds_of_videos():
    part = {"type": "video", "video": PAGES}
    _, response = await watch_parts(*[part] * 5)
    assert "At most 4 videos" in response.json()["error"]["message"]
    minute = {"type": "video_url", "video_url": {"url": MINUTE}}
    _, response = await watch_parts(minute, minute, {**part, "fps": 0.1})
    assert "longer than 20 s" in response.json()["error"]["message"]
    orchestrator, response = await watch_parts(part, watches=False)
    error = response.json()["error"]
    place = "messages[0].content[0].type"
    assert (error["code"], error["param"]) == ("unsupported_content_type", place)
    assert not orchestrator.sessions


def test_videos_of_other_frames_or_sides_have_other_digests():
    frames = noise_video(4, 64, 32).frames
    others = [frames, frames[:2], frames.reshape(4, 64, 32, 3), frames + np.uint8(1)]
    assert len({VideoPart(each).digest for each in others}) == 4
