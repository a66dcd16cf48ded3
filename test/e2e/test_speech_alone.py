"""A speaking language model alone in the whole server: no thinker, text in and sound out."""

import io
import json
import shutil
from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest
import soundfile as sf
import websockets

from sglang_live.models.qwen3_tts.parts import TTSTalker
from test.e2e.conftest import DATA, Server, running_server, wait_until
from test.qwen3_tts import checkpoint as tiny

pytestmark = [pytest.mark.e2e]

TEXT = "Good morning to you, and to all who listen."
FRAME = 1920  # samples


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("tts"), ends=True, clones=True)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory) -> Iterator[Server]:
    voices = tmp_path_factory.mktemp("voices")
    shutil.copy(DATA / "sp_jfk.flac", voices / "John.flac")
    logs = tmp_path_factory.mktemp("tts-logs")
    with running_server(str(model), logs, "--voices", str(voices)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.http}/v1", api_key="none", max_retries=0, timeout=60)


def speak(client: openai.OpenAI, kind: str, voice: str = "vivian", text: str = TEXT) -> np.ndarray:
    said = client.audio.speech.create(model="demo", voice=voice, input=text, response_format=kind)
    if kind == "pcm":
        return np.frombuffer(said.content, "<i2")
    with sf.SoundFile(io.BytesIO(said.content)) as file:
        assert file.samplerate == 24_000
        return file.read(60 * 24_000)


def test_a_text_is_spoken_in_every_format_to_its_end(client, model):
    talker = TTSTalker(model)
    n_read = len(talker.reads.encode(TEXT))
    for kind in ("pcm", "wav", "mp3", "opus", "flac"):
        samples = speak(client, kind)
        # Its speech ends with its text, a token a frame, and one frame more.
        assert len(samples) == pytest.approx((n_read + 1) * FRAME, abs=3 * FRAME), kind


def test_events_count_the_tokens_of_the_text_and_its_frames(server, client, model):
    body = {"input": TEXT, "voice": "eric", "response_format": "pcm", "stream_format": "sse"}
    with httpx.stream("POST", f"{server.http}/v1/audio/speech", json=body, timeout=60) as response:
        last = [line for line in response.iter_lines() if line][-1]
    n_read = len(TTSTalker(model).reads.encode(TEXT))
    used = {"input_tokens": n_read, "output_tokens": n_read + 1, "total_tokens": 2 * n_read + 1}
    assert json.loads(last.removeprefix("data: "))["usage"] == used


def test_its_voices_and_its_name_are_listed(server, client):
    voices = httpx.get(f"{server.http}/v1/audio/voices").json()["voices"]
    assert voices == ["vivian", "eric", "John"]
    [name] = [model.id for model in client.models.list()]
    assert name == "demo"


def test_a_recorded_voice_speaks_and_an_unknown_one_is_refused(client):
    cloned, preset = (speak(client, "pcm", voice) for voice in ("john", "vivian"))
    assert len(cloned) == len(preset) and np.abs(cloned.astype(int) - preset).max() > 300
    with pytest.raises(openai.BadRequestError, match=r"no voice 'nora'.*vivian, eric, John"):
        speak(client, "pcm", "nora")


async def test_a_conversation_is_refused_and_nothing_is_left_behind(server, client):
    with pytest.raises(openai.NotFoundError, match="no language model"):
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hi"}])
    async with websockets.connect(server.ws, proxy=None) as socket:
        refused = json.loads(await socket.recv())
        assert refused["error"]["code"] == "no_language_model"
    assert "no language model" in httpx.get(f"{server.http}/").text
    for stage, what in (("talker", "replies"), ("talker", "jobs"), ("vocoder", "streams")):
        wait_until(lambda s=stage, w=what: server.stage_load(s, w) == 0, 15, f"{stage} {what}")
    assert set(server.stage_starts().values()) == {1.0}
