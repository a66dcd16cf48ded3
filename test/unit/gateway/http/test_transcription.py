"""Transcription of files over plain HTTP."""

import asyncio
import io
import json

import httpx
import numpy as np
import pytest
import soundfile as sf
from openai import AsyncOpenAI

from sglang_live.core import INPUT_RATE_HZ, TranscriptDelta
from sglang_live.errors import StageUnavailableError
from test.unit.gateway.fakes import MODEL, FakeOrchestrator, app_of, done, full
from test.unit.gateway.live_server import listening

PATH = "/v1/audio/transcriptions"


def file_of(seconds: float = 0.5, rate_hz: int = 44_100, kind: str = "WAV", channels: int = 2):
    t = np.arange(round(seconds * rate_hz)) / rate_hz
    wave = np.repeat(0.3 * np.sin(2 * np.pi * 440 * t)[:, None], channels, axis=1)
    file = io.BytesIO()
    sf.write(file, wave, rate_hz, format=kind)
    return file.getvalue()


def writes(*pieces: str) -> FakeOrchestrator:
    return FakeOrchestrator([[*(TranscriptDelta(p) for p in pieces), done("".join(pieces))]])


async def ask(orchestrator: FakeOrchestrator, file: bytes | None = None, config=None, **fields):
    app = app_of(orchestrator, **(config or {}))
    transport = httpx.ASGITransport(app)
    files = {"file": ("said.wav", file_of() if file is None else file)}
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        return await http.post(PATH, data={"model": MODEL, **fields}, files=files)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
@pytest.mark.parametrize("channels", [1, 2])
async def test_the_model_gets_the_file_at_its_own_rate(kind, channels):
    orchestrator = writes("A ", "tone.")
    response = await ask(orchestrator, file_of(0.5, kind=kind, channels=channels))
    assert response.json()["text"] == "A tone."
    audio = orchestrator.turns[0].history[0].parts[0]
    assert audio.duration_s == pytest.approx(0.5, abs=0.06)
    middle = audio.pcm[len(audio.pcm) // 4 : -len(audio.pcm) // 4]
    spectrum = np.abs(np.fft.rfft(middle))
    assert spectrum.argmax() * INPUT_RATE_HZ / len(middle) == pytest.approx(440, abs=10)
    assert np.abs(middle).max() / 32768 == pytest.approx(0.3, rel=0.1)
    assert orchestrator.session.n_closed == 1


async def test_the_forms_language_and_prompt_reach_the_turn():
    orchestrator = writes("x")
    await ask(orchestrator, language="de", prompt="Regen", temperature="0.5")
    [turn] = orchestrator.turns
    text = turn.history[0].parts[1].text
    assert "de" in text and "Regen" in text
    assert (turn.temperature, turn.stateless, turn.wants_audio) == (0.5, True, False)


async def test_plain_text_and_usage():
    assert (await ask(writes(" Yes. "), response_format="text")).text == "Yes.\n"
    usage = (await ask(writes("Yes."))).json()["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (12, 3, 15)


async def test_a_recogniser_counts_seconds():
    response = await ask(writes("Yes."), file_of(0.5), {"recognises": True})
    assert response.json()["usage"] == {"type": "duration", "seconds": 0.5}


def three_times() -> bytes:
    """A sound three times, with pauses of 0.7 s."""
    t = np.arange(INPUT_RATE_HZ) / INPUT_RATE_HZ
    pause = np.zeros(round(0.7 * INPUT_RATE_HZ))
    file, sound = io.BytesIO(), 0.3 * np.sin(2 * np.pi * 440 * t)
    sf.write(file, np.concatenate([sound, pause] * 3), INPUT_RATE_HZ, format="WAV")
    return file.getvalue()


@pytest.mark.parametrize("stream", ["false", "true"])
async def test_a_sentence_is_transcribed_as_often_as_it_was_said(stream):
    again = [TranscriptDelta("Once "), TranscriptDelta("more."), done("Once more.")]
    orchestrator = FakeOrchestrator([again] * 3)
    config = {"hears_one_utterance": True}
    response = await ask(orchestrator, three_times(), config, stream=stream)
    body = response.json() if stream == "false" else json.loads(response.text.split("data: ")[-1])
    assert body["text"] == "Once more. Once more. Once more."
    assert (body["usage"]["input_tokens"], body["usage"]["output_tokens"]) == (36, 9)
    heard = [turn.history[0].parts[0].duration_s for turn in orchestrator.turns]
    assert len(heard) == 3 and min(heard) > 1.0 and max(heard) < 2.5


async def test_a_model_that_hears_more_gets_the_whole_recording():
    orchestrator = writes("Once more.")
    await ask(orchestrator, three_times())
    assert len(orchestrator.turns) == 1


async def test_events_report_a_failure_during_the_transcription():
    broken = FakeOrchestrator([[TranscriptDelta("A "), StageUnavailableError("gone")]])
    response = await ask(broken, stream="true")
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line]
    assert [event["type"] for event in events] == ["transcript.text.delta", "error"]
    assert events[-1]["error"]["code"] == "stage_unavailable"


async def test_events_have_the_same_text():
    response = await ask(writes("A ", "tone."), stream="true")
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line]
    assert [e["delta"] for e in events[:-1]] == ["A ", "tone."]
    assert (events[-1]["type"], events[-1]["text"]) == ("transcript.text.done", "A tone.")


@pytest.mark.parametrize("stream", [False, True])
async def test_openais_client_reads_it(stream):
    async with listening(app_of(writes("A ", "tone."))) as address:
        client = AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0)
        file = ("said.wav", file_of())
        made = await client.audio.transcriptions.create(model=MODEL, file=file, stream=stream)
        if stream:
            made = [event async for event in made][-1]
        assert made.text == "A tone."


@pytest.mark.parametrize(
    ("fields", "file", "status", "message"),
    [
        ({}, b"", 400, "audio file"),
        ({}, b"RIFF", 400, "audio file that can be read: wav,"),
        ({}, file_of(0), 400, "no samples"),
        ({}, file_of(3), 400, "longer than 2 s"),
        ({"model": "whisper-1"}, None, 404, MODEL),
        ({"response_format": "diarized_json"}, None, 400, "json, text"),
        ({"temperature": "hot"}, None, 400, "temperature"),
    ],
)
async def test_an_invalid_request_is_refused(fields, file, status, message):
    orchestrator = writes("x")
    response = await ask(orchestrator, file, {"max_input_audio_s": 2.0}, **fields)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]
    assert orchestrator.sessions == []


async def test_a_form_without_a_file_and_no_form_at_all_are_refused():
    transport = httpx.ASGITransport(app_of(writes("x")))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        for kind in ({"data": {"model": MODEL}}, {"json": {}}, {"data": {"file": "text"}}):
            response = await http.post(PATH, **kind)
            assert response.status_code == 400
            assert "'file'" in response.json()["error"]["message"]
        headers = {"content-type": "multipart/form-data; boundary=x"}
        response = await http.post(PATH, content=b"--x\r\nnonsense", headers=headers)
        assert response.status_code == 400


async def test_a_full_or_failed_server_reports_an_error():
    response = await ask(FakeOrchestrator(refuse_with=full()))
    assert (response.status_code, response.headers["retry-after"]) == (503, "3")
    failing = FakeOrchestrator([[StageUnavailableError("thinker/0 is down")]])
    response = await ask(failing, stream="true")
    assert response.json()["error"]["code"] == "stage_unavailable"
    assert failing.session.n_closed == 1


async def test_the_event_loop_is_free_while_a_long_file_is_read():
    orchestrator = writes("x")
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    ticking = asyncio.create_task(tick())
    await ask(orchestrator, file_of(60, channels=1))
    ticking.cancel()
    assert ticks > 10


async def test_an_upload_without_a_content_length_is_bounded():
    """Without a bound, the parser would write all of it to disk."""
    sent = 0

    async def endless():
        nonlocal sent
        yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        while sent < 100_000_000:
            sent += 50_000
            yield b"x" * 50_000

    orchestrator = writes("x")
    transport = httpx.ASGITransport(app_of(orchestrator, max_body_bytes=1_000_000))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        headers = {"content-type": "multipart/form-data; boundary=x"}
        response = await http.post(PATH, content=endless(), headers=headers)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert sent < 2_000_000
    assert orchestrator.sessions == []


async def test_a_client_that_leaves_ends_its_transcription():
    orchestrator = FakeOrchestrator([[TranscriptDelta("A "), asyncio.Event()]])
    async with listening(app_of(orchestrator)) as address:
        async with httpx.AsyncClient(base_url=f"http://{address}") as http:
            asking = asyncio.create_task(http.post(PATH, files={"file": ("a.wav", file_of())}))
            async with asyncio.timeout(30):
                while not orchestrator.sessions or not orchestrator.session.turns:
                    await asyncio.sleep(0.01)
            asking.cancel()
        await asyncio.wait_for(orchestrator.session.closed.wait(), 30)
    assert orchestrator.session.n_cancelled == 1


# --- silence ---


def silent_file() -> bytes:
    file = io.BytesIO()
    sf.write(file, np.zeros(10 * INPUT_RATE_HZ, np.int16), INPUT_RATE_HZ, format="WAV")
    return file.getvalue()


async def test_silence_has_an_empty_text_in_every_format_and_no_turn():
    orchestrator = FakeOrchestrator([[TranscriptDelta("close the shirt"), done("close")]] * 3)
    response = await ask(orchestrator, silent_file())
    assert response.json()["text"] == ""
    assert response.json()["usage"]["total_tokens"] == 0
    assert (await ask(orchestrator, silent_file(), response_format="text")).text == "\n"
    streamed = await ask(orchestrator, silent_file(), stream="true")
    [event] = [json.loads(line[6:]) for line in streamed.text.splitlines() if line]
    assert (event["type"], event["text"]) == ("transcript.text.done", "")
    assert orchestrator.turns == []


async def test_the_model_gets_only_the_speech():
    t = np.arange(INPUT_RATE_HZ) / INPUT_RATE_HZ
    speech = 0.3 * np.sin(2 * np.pi * 300 * t)
    silence = np.zeros(10 * INPUT_RATE_HZ)
    file = io.BytesIO()
    sf.write(file, np.concatenate((silence, speech, silence)), INPUT_RATE_HZ, format="WAV")
    orchestrator = writes("A tone.")
    assert (await ask(orchestrator, file.getvalue())).json()["text"] == "A tone."
    assert 1.0 <= orchestrator.turns[0].history[0].parts[0].duration_s <= 2.0


async def test_a_file_is_refused_while_the_disk_is_full(monkeypatch):
    async def full_disk(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("starlette.datastructures.UploadFile.write", full_disk)
    response = await ask(writes("x"))
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "server_overloaded"
    assert int(response.headers["retry-after"]) > 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"language": "de"}, "language"),
        ({"prompt": "Regen"}, "prompt"),
        ({"temperature": "0.5"}, "temperature"),
        ({"language": "en", "prompt": "", "temperature": "0"}, None),
        ({"language": "EN-us"}, None),
    ],
)
async def test_a_recogniser_takes_no_setting_that_it_does_not_heed(fields, param):
    files = {"file": ("said.wav", file_of())}
    transport = httpx.ASGITransport(app_of(writes("Rain."), recognises=True, hears="en"))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        response = await http.post(PATH, data=fields, files=files)
    assert response.status_code == (400 if param else 200), response.text
    assert param is None or response.json()["error"]["param"] == param
