"""Text to speech over plain HTTP."""

import asyncio
import base64
import io
import json
import wave

import httpx
import numpy as np
import pytest
import soundfile as sf

from sglang_live.core import OUTPUT_RATE_HZ, AudioDelta, Usage
from sglang_live.errors import StageUnavailableError
from sglang_live.gateway.audio.files import FORMATS
from sglang_live.sound import media
from test.unit.gateway.fakes import MODEL, FakeOrchestrator, app_of, done, full, tone
from test.unit.gateway.live_server import listening


def client(orchestrator: FakeOrchestrator, **config) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app_of(orchestrator, **config))
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")


def speaks(seconds: float = 1.0) -> FakeOrchestrator:
    n_pieces = round(seconds / 0.08)
    return FakeOrchestrator([[*(AudioDelta(tone(80)) for _ in range(n_pieces)), done("Hello.")]])


async def ask(orchestrator: FakeOrchestrator, **body) -> httpx.Response:
    body = {"input": "Hello.", "voice": "bob", "model": MODEL, **body}
    return await client(orchestrator).post("/v1/audio/speech", json=body)


def heard(data: bytes, name: str) -> np.ndarray:
    if name == "pcm":
        return np.frombuffer(data, "<i2") / 32768
    if name == "wav":
        assert data[:4] == b"RIFF"
        return np.frombuffer(data[44:], "<i2") / 32768
    if name == "aac":
        rate_hz, container = OUTPUT_RATE_HZ, media.container_of(data)
        return media.decode(data, container, rate_hz=rate_hz, max_s=60.0) / 32768
    with sf.SoundFile(io.BytesIO(data)) as file:
        assert file.samplerate == OUTPUT_RATE_HZ
        return file.read(60 * OUTPUT_RATE_HZ)  # a streamed file's header has no length


@pytest.mark.parametrize("name", FORMATS)
async def test_a_text_is_spoken_in_every_format(name):
    orchestrator = speaks(1.2)
    response = await ask(orchestrator, response_format=name)
    assert response.status_code == 200
    assert response.headers["content-type"] == FORMATS[name].media_type
    samples = heard(response.content, name)
    assert len(samples) / OUTPUT_RATE_HZ == pytest.approx(1.2, abs=0.15)
    # The pitch and level of the tone that was sent.
    middle = samples[len(samples) // 4 : 3 * len(samples) // 4]
    spectrum = np.abs(np.fft.rfft(middle))
    peak_hz = spectrum.argmax() * OUTPUT_RATE_HZ / len(middle)
    assert peak_hz == pytest.approx(300, abs=10)
    assert np.abs(middle).max() == pytest.approx(8000 / 32768, rel=0.2)


@pytest.mark.parametrize("speed", [0.25, 1.5, 4])
@pytest.mark.parametrize("name", ["pcm", "opus", "aac"])
async def test_speech_of_another_speed_has_the_same_pitch(name, speed):
    samples = heard((await ask(speaks(2.4), response_format=name, speed=speed)).content, name)
    assert len(samples) / OUTPUT_RATE_HZ == pytest.approx(2.4 / speed, abs=0.15)
    middle = samples[len(samples) // 4 : 3 * len(samples) // 4]
    peak_hz = np.abs(np.fft.rfft(middle)).argmax() * OUTPUT_RATE_HZ / len(middle)
    assert peak_hz == pytest.approx(300, abs=10)


async def test_without_pyav_aac_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(media, "is_installed", lambda: False)
    orchestrator = speaks()
    response = await ask(orchestrator, response_format="aac")
    assert response.status_code == 400
    assert "sglang-live[media]" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "response_format"
    assert orchestrator.sessions == []


async def test_a_flex_request_gets_a_file_that_says_how_long_it_is():
    flex = await ask(speaks(1.2), response_format="wav", service_tier="flex")
    assert int(flex.headers["content-length"]) == len(flex.content)
    assert sf.info(io.BytesIO(flex.content)).frames == 1.2 * OUTPUT_RATE_HZ
    with wave.open(io.BytesIO(flex.content)) as read:
        assert read.getnframes() == 1.2 * OUTPUT_RATE_HZ


async def test_the_talker_speaks_the_text_word_for_word():
    orchestrator = speaks()
    await ask(orchestrator, input="Read me.")
    [turn] = orchestrator.turns
    assert (turn.script, turn.voice, turn.stateless) == ("Read me.", "bob", True)
    [item] = turn.history
    assert (item.role, item.parts[0].text) == ("user", "Read me.")
    assert orchestrator.session.n_closed == 1


async def test_events_have_the_same_audio():
    response = await ask(speaks(), response_format="pcm", stream_format="sse")
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line]
    assert [e["type"] for e in events[-2:]] == ["speech.audio.delta", "speech.audio.done"]
    audio = b"".join(base64.b64decode(e["audio"]) for e in events[:-1])
    assert audio == tone(80) * 12


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"input": ""}, 400, "input"),
        ({"input": "  "}, 400, "no text to speak"),
        ({"input": "x" * 4097}, 400, "4096"),
        ({"input": "x" * 50_000}, 400, "4096"),
        ({"input": "語" * 50_000}, 413, "65536"),
        ({"response_format": "amr"}, 400, "mp3, opus, flac, wav, pcm, aac"),
        ({"speed": 4.5}, 400, "speed"),
        ({"speed": 0.2}, 400, "speed"),
        ({"model": "tts-1"}, 404, MODEL),
        ({"voice": "nora"}, 400, "no voice 'nora'. The voices are: ada, bob."),
        ({"voice": {"id": "nora"}}, 400, "no voice 'nora'"),
    ],
)
async def test_an_invalid_request_is_refused(body, status, message):
    orchestrator = speaks()
    response = await ask(orchestrator, **body)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]
    assert orchestrator.sessions == []


@pytest.mark.parametrize(
    ("given", "speaks_as"),
    [("BOB", "bob"), ("alloy", "ada"), (None, "ada"), ({"id": "bob"}, "bob")],
)
async def test_a_voice_is_found_in_any_case_and_openais_names_are_the_default(given, speaks_as):
    orchestrator = speaks()
    assert (await ask(orchestrator, voice=given)).status_code == 200
    assert orchestrator.turns[0].voice == speaks_as


async def test_a_text_without_a_sound_is_no_empty_file():
    silent = FakeOrchestrator([[done("日本語")]])
    response = await ask(silent, input="日本語")
    assert response.status_code == 400
    assert "speak nothing of 'input'" in response.json()["error"]["message"]
    assert silent.session.n_closed == 1


async def test_events_report_a_failure_during_speech():
    broken = FakeOrchestrator([[AudioDelta(tone(80)), StageUnavailableError("vocoder/0 died")]])
    response = await ask(broken, response_format="pcm", stream_format="sse")
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line]
    assert [event["type"] for event in events] == ["speech.audio.delta", "error"]
    assert events[-1]["error"]["code"] == "stage_unavailable"
    assert broken.session.n_closed == 1


async def test_a_full_or_failed_server_reports_an_error():
    busy = FakeOrchestrator(refuse_with=full())
    response = await ask(busy)
    assert (response.status_code, response.headers["retry-after"]) == (503, "3")
    failing = FakeOrchestrator([[StageUnavailableError("talker/0 is down")]])
    response = await ask(failing)
    assert response.json()["error"]["code"] == "stage_unavailable"
    assert failing.session.n_closed == 1


async def test_a_server_with_keys_needs_a_key():
    http = client(speaks(), api_keys=("k",))
    assert (await http.post("/v1/audio/speech", json={"input": "x"})).status_code == 401


# --- speech that does not end ---

ENDLESS = [AudioDelta(tone(1000)) for _ in range(2000)]


def events_of(response: httpx.Response) -> list[dict]:
    return [json.loads(line[6:]) for line in response.text.splitlines() if line]


def seconds(events: list[dict]) -> float:
    pcm = b"".join(base64.b64decode(e["audio"]) for e in events if "audio" in e)
    return len(pcm) / 2 / OUTPUT_RATE_HZ


@pytest.mark.parametrize("text", ["Hello.", "é" * 4096])
async def test_speech_ends_at_the_longest_duration_of_its_text_and_events_report_it(text):
    orchestrator = FakeOrchestrator([ENDLESS])
    response = await ask(orchestrator, input=text, response_format="pcm", stream_format="sse")
    events = events_of(response)
    assert seconds(events) < 90
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["code"] == "speech_truncated"
    # The pieces after it are not spoken either.
    assert len(orchestrator.turns) == 1
    assert (orchestrator.session.n_cancelled, orchestrator.session.n_closed) == (1, 1)


async def test_events_report_a_talker_that_reached_its_limit():
    cut = done("Hello.", status="incomplete", reason="max_output_tokens")
    response = await ask(FakeOrchestrator([[AudioDelta(tone(80)), cut]]), stream_format="sse")
    assert events_of(response)[-1]["error"]["code"] == "speech_truncated"


async def ask_at_a_socket(orchestrator: FakeOrchestrator, **body) -> httpx.Response:
    async with (
        listening(app_of(orchestrator)) as address,
        httpx.AsyncClient(base_url=f"http://{address}") as http,
    ):
        return await http.post("/v1/audio/speech", json={"input": "Hello.", **body})


# The first bytes of aac come from another process, and may come after the failure.
@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.grows and not f.blocks])
@pytest.mark.parametrize("ends", [ENDLESS, [*ENDLESS[:3], StageUnavailableError("gone")]])
async def test_a_truncated_file_that_was_begun_is_incomplete_and_no_crash(name, ends, caplog):
    with pytest.raises(httpx.RemoteProtocolError):
        await ask_at_a_socket(FakeOrchestrator([ends]), response_format=name)
    [told] = [record for record in caplog.records if record.name.startswith("sglang_live")]
    assert told.message.startswith("response_cut code=") and not told.exc_info
    assert not any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("body", [{"response_format": "flac"}, {"service_tier": "flex"}])
async def test_a_truncated_file_that_was_not_begun_is_an_error(body):
    response = await ask_at_a_socket(FakeOrchestrator([ENDLESS]), **body)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "speech_truncated"


async def test_a_client_that_leaves_ends_the_turn():
    orchestrator = FakeOrchestrator([[AudioDelta(tone(200)), asyncio.Event()]])
    async with listening(app_of(orchestrator)) as address:
        body = {"input": "Hello.", "response_format": "pcm"}
        async with (
            httpx.AsyncClient(base_url=f"http://{address}") as http,
            http.stream("POST", "/v1/audio/speech", json=body) as response,
        ):
            await anext(response.aiter_bytes())
        async with asyncio.timeout(30):
            await orchestrator.session.closed.wait()
    assert orchestrator.session.n_cancelled == 1


# --- long texts, and what they cost ---


async def test_a_long_text_is_spoken_in_pieces_without_a_gap():
    text = "The sun went down, and the children went home. " * 20
    one = [AudioDelta(tone(80)), AudioDelta(tone(80)), done("x")]
    orchestrator = FakeOrchestrator([list(one) for _ in range(10)])
    response = await ask(orchestrator, input=text, response_format="pcm")
    assert len(orchestrator.turns) == 4
    assert " ".join(turn.script for turn in orchestrator.turns) == text.strip()
    assert len(response.content) == 4 * 2 * len(tone(80))
    assert orchestrator.session.n_closed == 1


async def test_the_last_event_has_the_usage_of_all_pieces():
    usage = Usage(output_text_tokens=11, output_audio_tokens=40)
    spoken = [AudioDelta(tone(80)), done("x", usage=usage)]
    text = "The sun went down, and the children went home. " * 8
    orchestrator = FakeOrchestrator([list(spoken), list(spoken)])
    response = await ask(orchestrator, input=text, stream_format="sse")
    assert events_of(response)[-1] == {
        "type": "speech.audio.done",
        "usage": {"input_tokens": 22, "output_tokens": 80, "total_tokens": 102},
    }
