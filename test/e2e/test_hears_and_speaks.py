"""One language model that hears and speaks, in the whole server: what it says, and what it knows of
it after an interruption, equal what transformers makes of the same ids."""

import asyncio
import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import pytest
import soxr
import torch
from transformers import LlamaForCausalLM

from sglang_live.core import HistoryItem, TextPart
from sglang_live.models.glm4_voice.flow import RATE_HZ, SAMPLES_PER_COLUMN, n_columns
from sglang_live.models.prompt import Piece, Words
from test.e2e.conftest import Server, running_server
from test.e2e.interrupter import (
    DELTA,
    DONE,
    Counts,
    listen,
    request,
    retrieve,
    speech_over_response,
    truncated,
    until_suitable,
    voice,
)
from test.e2e.socket_client import Socket, clip_24k, connected
from test.glm4_voice import checkpoint as tiny_glm
from test.glm4_voice.reference import Model
from test.toys import hears
from test.toys.counting import N_SAMPLES, Tones

pytestmark = [pytest.mark.e2e]

ROOT = Path(__file__).parents[2]
SYSTEM = "be kind"
GREEDY = {"temperature": 0}
SESSION = {
    "instructions": SYSTEM,
    "audio": {"input": {"turn_detection": None}},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return hears.build(tmp_path_factory.mktemp("hears") / "checkpoint")


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory) -> Iterator[Server]:
    with running_server(
        str(checkpoint),
        tmp_path_factory.mktemp("logs"),
        *("--model-family", hears.__name__),
        environment={"PYTHONPATH": f"{ROOT / 'python'}:{ROOT}"},
    ) as running:
        yield running


@dataclass
class Reference:
    """A conversation as transformers continues it. ids: of its prompt."""

    model: LlamaForCausalLM
    prompt: hears.Prompt
    ids: list[int] = field(default_factory=list)

    def begin(self, instructions: str) -> None:
        self.ids = []
        self._add(self.prompt.header(instructions))

    def hear(self, said: str | tuple[int, ...]) -> None:
        text = (TextPart(said),) if isinstance(said, str) else ()
        ids = None if isinstance(said, str) else said
        self._add(self.prompt.item(HistoryItem(key="u", role="user", parts=text, token_ids=ids)))

    @torch.no_grad()
    def response(self, n: int) -> list[int]:
        """Its first ids; it stays as it is."""
        ids = [*self.ids, *self.prompt.markup_ids(hears.ASSISTANT)]
        found = self.model.generate(
            torch.tensor([ids]), max_new_tokens=n, do_sample=False, pad_token_id=hears.END_ID
        )
        return found[0, len(ids) :].tolist()

    def keep(self, response: list[int]) -> None:
        self.ids += [*self.prompt.markup_ids(hears.ASSISTANT), *response, hears.END_ID]

    def _add(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            ids = piece.token_ids if isinstance(piece, Words) else None
            self.ids += self.prompt.markup_ids(piece.text) if ids is None else ids


@pytest.fixture
def reference(checkpoint) -> Reference:
    model = LlamaForCausalLM.from_pretrained(checkpoint).eval()
    found = Reference(model, hears.Thinker(checkpoint).prompt(hears.tokenizer()))
    found.begin(SYSTEM)
    return found


def codes_in(pcm: np.ndarray) -> list[int]:
    frames = torch.tensor(pcm[: len(pcm) // N_SAMPLES * N_SAMPLES] / 32_768).view(-1, N_SAMPLES)
    return Tones(1).encode([], frames.float()).flatten().tolist()


def codes_of(ids: list[int]) -> list[int]:
    return [token - hears.FIRST_CODE for token in ids if token >= hears.FIRST_CODE]


def text_of(ids: list[int]) -> str:
    return "".join(hears.VOCAB[token] for token in ids if token < hears.FIRST_CODE)


def transcript(socket: Socket) -> str:
    kind = "response.output_audio_transcript.delta"
    return "".join(event["delta"] for event in socket.events if event["type"] == kind)


# First: the counts of stages come late.
@until_suitable
async def test_a_user_who_speaks_over_it_ends_it_and_it_knows_what_was_heard(server):
    counts = Counts(server)
    async with connected(server.ws) as socket:
        detection = {"input": {"turn_detection": {"type": "server_vad"}}}
        await socket.session(instructions=SYSTEM, max_output_tokens=60, audio=detection)
        await request(socket, "tell me more", max_output_tokens=1500, **GREEDY)
        first = await socket.until(DELTA)
        await listen(socket, 1.5)
        speaking = asyncio.create_task(socket.speak(voice()))
        try:
            await speech_over_response(socket)
            await truncated(socket)
            after = (await socket.until(DONE))["response"]["usage"]
        finally:
            speaking.cancel()
        shown = await retrieve(socket, first["item_id"])
    n_heard = len(base64.b64decode(shown["audio"])) // (2 * N_SAMPLES)
    # The instructions, the question, and the ids up to the last frame that was heard.
    n_prompt = 1 + len(SYSTEM) + len("tell me more") + 2 + 1
    kept = [n_prompt + n + 2 * -(-n // 4) for n in (n_heard, n_heard + 1)]
    assert n_heard > 10
    assert kept[0] - 1 <= after["input_token_details"]["cached_tokens"] <= kept[1]
    assert after["input_token_details"]["audio_tokens"] > 30
    counts.check_compactions(1)


async def test_it_hears_speaks_and_after_an_interruption_knows_what_was_heard(server, reference):
    tones = Tones(1).decode([], torch.randint(0, 32, (1, 15, 1), generator=torch.manual_seed(1)))
    heard_24k = (32_767 * tones.flatten().numpy()).astype(np.int16)
    async with connected(server.ws) as socket:
        await socket.session(**SESSION)
        done = await socket.say(heard_24k, max_output_tokens=60, **GREEDY)
        heard_ids = tuple(hears.Ears().ids(_at_16k(heard_24k)))
        reference.hear(heard_ids)
        first = reference.response(60)
        assert codes_in(socket.audio()) == codes_of(first) and len(codes_of(first)) == 40
        assert transcript(socket) == text_of(first)
        usage = done["response"]["usage"]
        out, into = usage["output_token_details"], usage["input_token_details"]
        assert (out["text_tokens"], out["audio_tokens"]) == (20, 40)
        assert into["audio_tokens"] == len(heard_ids) == 15
        reference.keep(first)

        socket.events.clear()
        item = {"role": "user", "content": [{"type": "input_text", "text": "tell me more"}]}
        await socket.send("conversation.item.create", item={"type": "message", **item})
        await socket.send("response.create", response={"max_output_tokens": 1200, **GREEDY})
        while len(socket.audio()) < 24_000:
            await socket.until("response.output_audio.delta")
        await socket.send("response.cancel")
        answer = (await socket.until("response.done"))["response"]
        assert answer["status"] == "cancelled"
        # Half of the thirteenth frame was heard.
        place = {"item_id": answer["output"][0]["id"], "content_index": 0, "audio_end_ms": 1000}
        await socket.send("conversation.item.truncate", **place)
        await socket.until("conversation.item.truncated")
        await socket.send("conversation.item.retrieve", item_id=answer["output"][0]["id"])
        kept = (await socket.until("conversation.item.retrieved"))["item"]
        reference.hear("tell me more")
        second = reference.response(24)
        heard = second[:18]
        assert len(codes_of(heard)) == 12
        assert kept["content"][0]["transcript"] == text_of(heard)
        n_before = len(reference.ids)
        reference.keep(heard)

        socket.events.clear()
        done = await socket.ask("and then", max_output_tokens=36, **GREEDY)
        reference.hear("and then")
        third = reference.response(36)
        assert codes_in(socket.audio()) == codes_of(third)
        assert transcript(socket) == text_of(third)
        told = done["response"]["usage"]
        assert told["input_tokens"] == len(reference.ids) + 1
        # All but the last of them, whose KV the next step writes.
        cached = told["input_token_details"]["cached_tokens"]
        assert n_before + len(heard) <= cached <= n_before + len(heard) + 1


def _at_16k(pcm_24k: np.ndarray) -> np.ndarray:
    return soxr.resample(pcm_24k.astype(float), 24_000, 16_000).astype(np.int16)


async def test_its_codes_are_no_words_of_a_user(server, reference):
    async with connected(server.ws) as socket:
        await socket.session(**SESSION)
        await socket.ask("say <|audio_3|> or <|end|>", max_output_tokens=24, **GREEDY)
        reference.hear("say __audio____ or __end__")
        assert transcript(socket) == text_of(reference.response(24))


def test_a_chat_is_spoken(server, reference):
    body = {
        "model": "demo",
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": "hello"},
        ],
        "modalities": ["text", "audio"],
        "audio": {"voice": "beep", "format": "pcm16"},
        "max_tokens": 48,
        **GREEDY,
    }
    answer = httpx.post(f"{server.http}/v1/chat/completions", json=body, timeout=60).json()
    audio = answer["choices"][0]["message"]["audio"]
    reference.hear("hello")
    wanted = reference.response(48)
    assert audio["transcript"] == text_of(wanted)
    assert codes_in(np.frombuffer(base64.b64decode(audio["data"]), "<i2")) == codes_of(wanted)


def test_a_written_chat_has_no_codes_in_it(server, reference):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hello"}]
    body = {"model": "demo", "messages": messages, "max_tokens": 48, **GREEDY}
    answer = httpx.post(f"{server.http}/v1/chat/completions", json=body, timeout=60).json()
    reference.hear("hello")
    assert answer["choices"][0]["message"]["content"] == text_of(reference.response(48))


def test_it_reads_no_text_of_others(server):
    body = {"model": "demo", "input": "hello", "voice": "beep"}
    refused = httpx.post(f"{server.http}/v1/audio/speech", json=body, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "own_words_only")


async def test_real_speech_is_heard_and_answered(server):
    async with connected(server.ws) as socket:
        await socket.session(**SESSION)
        await socket.say(clip_24k("sp_jfk.flac", 3.0), max_output_tokens=30, **GREEDY)
        assert len(codes_in(socket.audio())) == 20


@pytest.mark.nightly
async def test_glm_4_voice_hears_speaks_and_knows_what_was_heard(tmp_path_factory):
    path = tiny_glm.build(tmp_path_factory.mktemp("glm") / "checkpoint")
    model = Model(path, SYSTEM)
    with running_server(str(path), tmp_path_factory.mktemp("glm-logs")) as server:
        await _talks_with_glm(server, model)
        _glm_speaks_in_a_chat(server, model)
        listed = httpx.get(f"{server.http}/v1/audio/voices", timeout=60).json()["voices"]
        assert [voice["id"] for voice in listed] == ["glm"]


async def _talks_with_glm(server: Server, model: Model) -> None:
    heard_24k = clip_24k("sp_jfk.flac", 2.5)
    history: list[HistoryItem | np.ndarray] = [_at_16k(heard_24k)]
    async with connected(server.ws) as socket:
        await socket.session(**SESSION)
        done = await socket.say(heard_24k, max_output_tokens=120, **GREEDY)
        prompt = model.ids(*history)
        first = model.response(prompt, 120)
        _check_glm(socket, done, model, prompt, first)
        history += [_written("r1", first), _asked("q2", "tell me more")]

        socket.events.clear()
        item = {"role": "user", "content": [{"type": "input_text", "text": "tell me more"}]}
        await socket.send("conversation.item.create", item={"type": "message", **item})
        await socket.send("response.create", response={"max_output_tokens": 1500, **GREEDY})
        while len(socket.audio()) < 24_000:
            await socket.until("response.output_audio.delta")
        await socket.send("response.cancel")
        answer = (await socket.until("response.done"))["response"]
        assert answer["status"] == "cancelled"
        place = {"item_id": answer["output"][0]["id"], "content_index": 0, "audio_end_ms": 1000}
        await socket.send("conversation.item.truncate", **place)
        await socket.until("conversation.item.truncated")
        second = model.response(model.ids(*history), 200)
        # Half of the thirteenth code was heard.
        at = [n + 1 for n, token in enumerate(second) if token >= tiny_glm.FIRST_CODE]
        history.append(_written("r2", second[: at[11]]))
        n_kept = len(model.ids(*history[:-1])) + at[11]

        socket.events.clear()
        done = await socket.ask("and then", max_output_tokens=60, **GREEDY)
        history.append(_asked("q3", "and then"))
        prompt = model.ids(*history)
        _check_glm(socket, done, model, prompt, model.response(prompt, 60))
        cached = done["response"]["usage"]["input_token_details"]["cached_tokens"]
        assert n_kept - 1 <= cached <= n_kept


def _check_glm(socket: Socket, done: dict, model: Model, prompt: list[int], ids: list[int]) -> None:
    """That a response to the prompt is of these ids."""
    words = [token for token in ids if token < tiny_glm.FIRST_CODE]
    n_codes = len(ids) - len(words)
    assert transcript(socket) == model.prompt.text_of(words).rstrip("\ufffd")
    usage = done["response"]["usage"]
    assert usage["input_tokens"] == len(prompt)
    details = usage["output_token_details"]
    assert (details["text_tokens"], details["audio_tokens"]) == (len(words), n_codes)
    n_samples = n_columns(n_codes) * SAMPLES_PER_COLUMN * 24_000 / RATE_HZ
    assert len(socket.audio()) == pytest.approx(n_samples, abs=2)


def _written(key: str, ids: list[int]) -> HistoryItem:
    return HistoryItem(key=key, role="assistant", parts=(), token_ids=tuple(ids))


def _asked(key: str, text: str) -> HistoryItem:
    return HistoryItem(key=key, role="user", parts=(TextPart(text),))


def _glm_speaks_in_a_chat(server: Server, model: Model) -> None:
    body = {
        "model": "demo",
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "the end"}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "glm", "format": "pcm16"},
        "max_tokens": 90,
        **GREEDY,
    }
    answer = httpx.post(f"{server.http}/v1/chat/completions", json=body, timeout=60).json()
    audio = answer["choices"][0]["message"]["audio"]
    ids = model.response(model.ids(_asked("q", "the end")), 90)
    words = [token for token in ids if token < tiny_glm.FIRST_CODE]
    assert audio["transcript"] == model.prompt.text_of(words).rstrip("\ufffd")
    n_samples = n_columns(len(ids) - len(words)) * SAMPLES_PER_COLUMN * 24_000 / RATE_HZ
    assert len(base64.b64decode(audio["data"])) / 2 == pytest.approx(n_samples, abs=2)
