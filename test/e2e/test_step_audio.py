"""Step-Audio 2 mini in the whole server, on tiny random weights: three turns with an interruption,
and a spoken chat, equal what transformers and the decoder make of the same ids."""

import base64
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from sglang_live.core import HistoryItem, TextPart
from sglang_live.models.codecs import END_CODE
from sglang_live.models.step_audio.decoder import StepAudioDecoder
from test.e2e.conftest import Server, running_server
from test.e2e.socket_client import clip_24k, connected
from test.e2e.test_hears_and_speaks import GREEDY, SESSION, SYSTEM, transcript
from test.engine.test_step_audio import Model
from test.engine.turns import user
from test.step_audio import checkpoint as tiny

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

N_SAMPLES = 960  # of a code


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("step") / "checkpoint")


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory) -> Iterator[Server]:
    with running_server(str(checkpoint), tmp_path_factory.mktemp("logs")) as running:
        yield running


@pytest.fixture(scope="module")
def model(checkpoint) -> Model:
    return Model(checkpoint, SYSTEM)


@pytest.fixture(scope="module")
def decoder(checkpoint) -> StepAudioDecoder:
    return StepAudioDecoder.from_pretrained(checkpoint, "cpu", torch.float32)


def codes_of(ids: list[int]) -> list[int]:
    return [token - tiny.FIRST_CODE for token in ids if token >= tiny.FIRST_CODE]


def text_of(model: Model, ids: list[int]) -> str:
    return model.prompt.text_of([t for t in ids if t < tiny.FIRST_CODE]).rstrip("\ufffd")


def check_sound(decoder: StepAudioDecoder, pcm: np.ndarray, codes: list[int]) -> None:
    stream, left, waves = decoder.new_stream("ada"), torch.tensor(codes)[:, None], []
    while len(left) >= (n := stream.rule.frames(len(waves))):
        waves += decoder.decode([stream], [left[:n]])
        left = left[n:]
    waves += decoder.decode([stream], [torch.cat((left, torch.tensor([[END_CODE]])))])
    expected = torch.cat(waves).numpy()
    assert len(pcm) == len(expected) == N_SAMPLES * len(codes)
    assert np.abs(pcm / 32_768 - expected).max() < 0.01


async def test_three_turns_with_an_interruption_know_what_was_heard(server, model, decoder):
    first, second, third = (user(text) for text in ("the little list", "tell me more", "and then"))
    async with connected(server.ws) as socket:
        await socket.session(**SESSION)
        await socket.ask(first.parts[0].text, max_output_tokens=60, **GREEDY)
        told = [(transcript(socket), socket.audio())]

        socket.events.clear()
        item = {"role": "user", "content": [{"type": "input_text", "text": "tell me more"}]}
        await socket.send("conversation.item.create", item={"type": "message", **item})
        await socket.send("response.create", response={"max_output_tokens": 1500, **GREEDY})
        while len(socket.audio()) < 1.2 * 24_000:
            await socket.until("response.output_audio.delta")
        await socket.send("response.cancel")
        answer = (await socket.until("response.done"))["response"]
        assert answer["status"] == "cancelled"
        # Half of the 26th code was heard.
        place = {"item_id": answer["output"][0]["id"], "content_index": 0, "audio_end_ms": 1020}
        await socket.send("conversation.item.truncate", **place)
        await socket.until("conversation.item.truncated")

        socket.events.clear()
        done = await socket.ask("and then", max_output_tokens=40, **GREEDY)
        told.append((transcript(socket), socket.audio()))

        socket.events.clear()
        # Not tones, which are no speech for the server: it does not answer them.
        spoken = await socket.say(clip_24k("sp_jfk.flac", 2.0), max_output_tokens=30, **GREEDY)
        heard_text, heard_pcm = transcript(socket), socket.audio()

    # Behind the call: these take seconds, in which no ping would be answered.
    said = [model.response(first, n=60)]
    history = [first, _reply(said[0]), second]
    whole = model.response(*history, n=300)
    heard = whole[: [i for i, t in enumerate(whole) if t >= tiny.FIRST_CODE][24] + 1]
    history += [_reply(heard), third]
    said.append(model.response(*history, n=40))
    for (text, pcm), ids in zip(told, said, strict=True):
        assert text == text_of(model, ids)
        check_sound(decoder, pcm, codes_of(ids))
    usage = done["response"]["usage"]
    assert usage["input_tokens"] == len(model.ids(*history))
    n_before = len(model.ids(*history[:3])) + len(heard)
    assert n_before - 1 <= usage["input_token_details"]["cached_tokens"] <= n_before
    usage = spoken["response"]["usage"]
    n_codes = usage["output_token_details"]["audio_tokens"]
    assert len(heard_pcm) == N_SAMPLES * n_codes and 0 < n_codes < 30
    # 12.5 a second.
    assert 20 < usage["input_token_details"]["audio_tokens"] < 32
    assert "<audio_" not in heard_text


def _reply(ids: list[int]) -> HistoryItem:
    return HistoryItem(key="reply", role="assistant", parts=(TextPart("x"),), token_ids=tuple(ids))


def test_a_chat_is_spoken(server, model, decoder):
    body = {
        "model": "demo",
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": "the end"},
        ],
        "modalities": ["text", "audio"],
        "audio": {"voice": "ada", "format": "pcm16"},
        "max_tokens": 60,
        **GREEDY,
    }
    answer = httpx.post(f"{server.http}/v1/chat/completions", json=body, timeout=60).json()
    audio = answer["choices"][0]["message"]["audio"]
    said = model.response(user("the end"), n=60)
    assert audio["transcript"] == text_of(model, said)
    out = answer["usage"]["completion_tokens_details"]
    n_codes = len(codes_of(said))
    assert (out["text_tokens"], out["audio_tokens"]) == (60 - n_codes, n_codes)
    pcm = np.frombuffer(base64.b64decode(audio["data"]), "<i2")
    check_sound(decoder, pcm, codes_of(said))


def test_it_reads_no_text_of_others(server):
    body = {"model": "demo", "input": "hello", "voice": "ada"}
    refused = httpx.post(f"{server.http}/v1/audio/speech", json=body, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "own_words_only")
