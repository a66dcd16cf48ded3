"""A speaking language model alone in the whole server: no thinker, text in and sound out."""

import base64
import io
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import httpx
import numpy as np
import openai
import pytest
import soundfile as sf
import websockets

from sglang_live.models.chatterbox.family import MEAN_WEIGHTS
from sglang_live.models.qwen3_tts.parts import TTSTalker
from test.chatterbox import checkpoint as tiny_chatterbox
from test.chatterbox_turbo import checkpoint as tiny_turbo
from test.cosyvoice import checkpoint as tiny_cosyvoice
from test.csm import checkpoint as tiny_csm
from test.e2e.conftest import DATA, Server, running_server, wait_until
from test.higgs_v2 import checkpoint as tiny_higgs
from test.moss_tts import checkpoint as tiny_moss
from test.orpheus import checkpoint as tiny_orpheus
from test.qwen3_tts import checkpoint as tiny
from test.zonos import checkpoint as tiny_zonos
from test.zonos.checkpoint import espeak

__all__ = ["espeak"]
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
    made = tmp_path_factory.mktemp("custom-voices")
    flags = "--voices", str(voices), "--custom-voices", str(made), "--custom-voice-key", MAKER
    keys = "--api-key", MAKER, "--api-key", KEY
    with running_server(str(model), logs, *flags, *keys) as running:
        running.headers = KEYED
        yield running


# The first may make voices.
MAKER, KEY = "maker", "none"
KEYED = {"authorization": f"Bearer {KEY}"}


def client_of(server: Server, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.http}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return client_of(server)


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


def events_of(server: Server, voice: str, **fields) -> list[dict]:
    """The events of a spoken text."""
    body = {"input": TEXT, "voice": voice, "response_format": "pcm", "stream_format": "sse"}
    request = ("POST", f"{server.http}/v1/audio/speech")
    with httpx.stream(*request, json=body | fields, headers=server.headers, timeout=60) as response:
        lines = [line for line in response.iter_lines() if line]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_events_count_the_tokens_of_the_text_and_its_frames(server, model):
    n_read = len(TTSTalker(model).reads.encode(TEXT))
    used = {"input_tokens": n_read, "output_tokens": n_read + 1, "total_tokens": 2 * n_read + 1}
    assert events_of(server, "eric")[-1]["usage"] == used


def test_its_voices_and_its_name_are_listed(server, client):
    voices = httpx.get(f"{server.http}/v1/audio/voices", headers=server.headers).json()["voices"]
    assert [voice["id"] for voice in voices] == ["vivian", "eric", "John"]
    [name] = [model.id for model in client.models.list()]
    assert name == "demo"


def test_a_recorded_voice_speaks_and_an_unknown_one_is_refused(client):
    cloned, preset = (speak(client, "pcm", voice) for voice in ("john", "vivian"))
    assert len(cloned) == len(preset) and np.abs(cloned.astype(int) - preset).max() > 300
    with pytest.raises(openai.BadRequestError, match=r"no voice 'nora'.*vivian, eric, John"):
        speak(client, "pcm", "nora")


def test_a_client_makes_a_voice_that_speaks_as_one_of_the_start_does(server, client):
    """The recordings are the same, and so is the sound, but for its seed."""
    maker = client_of(server, MAKER)
    with voice_of_a_client(server) as voice:
        said, as_john = (speak(maker, "pcm", name) for name in (voice, "John"))
        assert len(said) == len(as_john) and np.abs(said.astype(int)).max() > 300
        with pytest.raises(openai.BadRequestError, match=f"no voice '{voice}'"):
            speak(client, "pcm", voice)


@contextmanager
def voice_of_a_client(server: Server) -> Iterator[str]:
    """Made of a recording by MAKER, and deleted behind its use."""
    url, headers = f"{server.http}/v1/audio/voices", {"authorization": f"Bearer {MAKER}"}
    form = {"name": "John", "consent": "I agree."}
    with (DATA / "sp_jfk.flac").open("rb") as file:
        files = {"audio_sample": file}
        response = httpx.post(url, data=form, files=files, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    voice = response.json()["id"]
    yield voice
    assert httpx.delete(f"{url}/{voice}", headers=headers).status_code == 200
    with pytest.raises(openai.BadRequestError, match=f"no voice '{voice}'"):
        speak(client_of(server, MAKER), "pcm", voice)


async def test_a_conversation_is_refused_and_nothing_is_left_behind(server, client):
    await refuses_conversations(server, client)
    leaves_nothing_behind(server)


@pytest.mark.nightly
async def test_orpheus_alone_speaks_in_pieces(tmp_path_factory):
    # Its pieces are short: one that reaches its bound would end the response.
    path = tiny_orpheus.build(tmp_path_factory.mktemp("orpheus"), end_every=2)
    with running_server(str(path), tmp_path_factory.mktemp("orpheus-logs")) as server:
        client = client_of(server)
        voices = httpx.get(f"{server.http}/v1/audio/voices").json()["voices"]
        assert (voices[0]["id"], len(voices)) == ("tara", 8)
        for kind in ("wav", "opus"):
            assert len(speak(client, kind, "leo")) >= FRAME
        for tier in ("default", "flex"):
            *chunks, end = events_of(server, "tara", service_tier=tier)
            n_samples = sum(len(base64.b64decode(chunk["audio"])) for chunk in chunks) // 2
            # Whole frames of 7 codes; usage counts frames of 80 ms.
            assert n_samples and n_samples % 2048 == 0
            assert end["usage"]["output_tokens"] == round(n_samples / FRAME)
        # All sentences of a long text are read.
        n_read = events_of(server, "tara", input=" ".join([TEXT] * 8))[-1]["usage"]["input_tokens"]
        assert n_read > 6 * end["usage"]["input_tokens"]
        with pytest.raises(openai.BadRequestError, match=r"no voice 'nora'.*tara, "):
            speak(client, "pcm", "nora")
        await refuses_conversations(server, client)
        leaves_nothing_behind(server)


@pytest.mark.nightly
async def test_csm_alone_speaks_in_pieces_and_takes_on_a_voice(tmp_path_factory):
    path = tiny_csm.build(tmp_path_factory.mktemp("csm"), end_every=16)
    voices = tmp_path_factory.mktemp("csm-voices")
    shutil.copy(DATA / "sp_jfk.flac", voices / "John.flac")
    (voices / "John.txt").write_text("And so, my fellow Americans.")
    logs = tmp_path_factory.mktemp("csm-logs")
    with running_server(str(path), logs, "--voices", str(voices)) as server:
        client = client_of(server)
        listed = httpx.get(f"{server.http}/v1/audio/voices").json()["voices"]
        assert [voice["id"] for voice in listed] == [*"0123456789", "John"]
        for kind, voice in (("wav", "3"), ("opus", "john")):
            assert len(speak(client, kind, voice)) >= FRAME
        for tier in ("default", "flex"):
            *chunks, end = events_of(server, "John", service_tier=tier)
            n_samples = sum(len(base64.b64decode(chunk["audio"])) for chunk in chunks) // 2
            assert n_samples and n_samples % FRAME == 0
            assert end["usage"]["output_tokens"] == n_samples // FRAME
        n_read = events_of(server, "0", input=" ".join([TEXT] * 8))[-1]["usage"]["input_tokens"]
        assert n_read > 6 * events_of(server, "0")[-1]["usage"]["input_tokens"]
        with pytest.raises(openai.BadRequestError, match=r"no voice 'nora'.*0, 1, "):
            speak(client, "pcm", "nora")
        await refuses_conversations(server, client)
        leaves_nothing_behind(server)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "tiny_delay", [tiny_higgs, tiny_moss, tiny_zonos], ids=["higgs_v2", "moss_tts", "zonos"]
)
async def test_a_family_with_a_delay_speaks_alone_in_pieces(tiny_delay, tmp_path_factory, espeak):
    path = tiny_delay.build(tmp_path_factory.mktemp("delay"), end_every=16)
    with running_server(str(path), tmp_path_factory.mktemp("delay-logs")) as server:
        client = client_of(server)
        frame = tiny_delay.SAMPLES_PER_FRAME
        assert len(speak(client, "wav", "random")) >= frame
        *chunks, _ = events_of(server, "random")
        n_samples = sum(len(base64.b64decode(chunk["audio"])) for chunk in chunks) // 2
        assert n_samples and n_samples % frame == 0
        with pytest.raises(openai.BadRequestError, match=r"no voice 'nora'.*random"):
            speak(client, "pcm", "nora")
        await refuses_conversations(server, client)
        leaves_nothing_behind(server)


@pytest.mark.parametrize(
    ("build", "voice", "frame"),
    [
        pytest.param(partial(tiny_cosyvoice.build, end_every=16), "anna", 960, id="cosyvoice2"),
        pytest.param(
            partial(tiny_chatterbox.build, end_every=16),
            "default",
            960,
            marks=pytest.mark.nightly,
            id="chatterbox",
        ),
        pytest.param(
            partial(tiny_turbo.build, end_every=16),
            "default",
            960,
            marks=pytest.mark.nightly,
            id="chatterbox_turbo",
        ),
    ],
)
async def test_codes_become_sound_by_a_flow(build, voice, frame, tmp_path_factory):
    path, voices = build(tmp_path_factory.mktemp("flow")), tmp_path_factory.mktemp("voices")
    shutil.copy(DATA / "sp_jfk.flac", voices / "John.flac")
    (voices / "John.txt").write_text("And so, my fellow Americans.")
    made = str(tmp_path_factory.mktemp("custom-voices"))
    flags = ["--voices", str(voices), "--custom-voices", made]
    flags += ["--custom-voice-key", MAKER, "--api-key", MAKER]
    with running_server(str(path), tmp_path_factory.mktemp("flow-logs"), *flags) as server:
        client = client_of(server, MAKER)
        server.headers = {"authorization": f"Bearer {MAKER}"}
        for name in (voice, "John"):
            assert len(speak(client, "wav", name)) >= frame
        with voice_of_a_client(server) as name:
            said = speak(client, "pcm", name)
            assert len(said) >= frame and np.abs(said.astype(int)).max() > 300
        *chunks, end = events_of(server, voice)
        n_samples = sum(len(base64.b64decode(chunk["audio"])) for chunk in chunks) // 2
        assert n_samples % frame == 0
        if (path / MEAN_WEIGHTS).is_file():
            # Three codes of silence are behind each of the text's two pieces.
            n_samples -= 2 * 3 * frame
        # Usage counts what lasts as long as a frame of Qwen3-Omni; half of one is either.
        assert end["usage"]["output_tokens"] == pytest.approx(n_samples / FRAME, abs=0.5)
        with pytest.raises(openai.BadRequestError, match=r"no voice 'nora'"):
            speak(client, "pcm", "nora")
        await refuses_conversations(server, client)
        leaves_nothing_behind(server)


async def refuses_conversations(server: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no language model"):
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hi"}])
    headers = server.headers
    async with websockets.connect(server.ws, additional_headers=headers, proxy=None) as socket:
        refused = json.loads(await socket.recv())
        assert refused["error"]["code"] == "no_language_model"
    assert "no language model" in httpx.get(f"{server.http}/").text


def leaves_nothing_behind(server: Server) -> None:
    for stage, what in (("talker", "replies"), ("talker", "jobs"), ("vocoder", "streams")):
        wait_until(lambda s=stage, w=what: server.stage_load(s, w) == 0, 15, f"{stage} {what}")
    assert set(server.stage_starts().values()) == {1.0}
