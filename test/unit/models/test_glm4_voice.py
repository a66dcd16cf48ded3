"""GLM-4-Voice on tiny random weights: its tokenizers and prompt, against restated ones."""

import json
from pathlib import Path

import numpy as np
import pytest

from sglang_live.core import HistoryItem, TextPart
from sglang_live.errors import BadInputError
from sglang_live.models.family import model_facts
from sglang_live.models.glm4_voice.ears import GlmEars
from sglang_live.models.glm4_voice.family import (
    DECODER,
    DECODER_FILES,
    TOKENIZER,
    VOICE,
    GlmVoiceSpec,
)
from sglang_live.models.glm4_voice.parts import TASK, GlmPrompt
from sglang_live.models.glm4_voice.tokenizer import fast_tokenizer
from sglang_live.models.prompt import Markup, Piece, Words
from test.glm4_voice import checkpoint as tiny
from test.glm4_voice import reference

TEXTS = (
    "the little list",
    "And in the\n\n end, it's 12345!  ",
    "Grüße, 世界",
    "<|audio_3|><|user|>",
)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("glm") / "checkpoint")


@pytest.fixture(scope="module")
def prompt(path) -> GlmPrompt:
    return GlmPrompt(GlmVoiceSpec.load(path), fast_tokenizer(path))


def ids_of(prompt: GlmPrompt, pieces: list[Piece]) -> list[int]:
    ids: list[int] = []
    for piece in pieces:
        assert isinstance(piece, Markup | Words)
        ids += prompt.markup_ids(piece.text) if isinstance(piece, Markup) else piece.token_ids
    return ids


def with_control(text: str) -> list[int]:
    """Ids of text with control tokens, restated."""
    ids, ranks = [], tiny.ranks()
    names = {name: number for number, name in tiny.special().items()}
    while text:
        found = [(at, -len(name), name) for name in names if (at := text.find(name)) >= 0]
        at, _, name = min(found, default=(len(text), 0, ""))
        ids += reference.encode(text[:at], ranks) + ([names[name]] if name else [])
        text = text[at + len(name) :]
    return ids


@pytest.mark.parametrize("text", TEXTS)
def test_text_has_the_ids_of_byte_pairs_in_the_order_of_their_ranks(prompt, text):
    assert prompt.words(text) == reference.encode(text, tiny.ranks())


def test_control_tokens_and_codes_have_their_published_ids(prompt):
    text = "[gMASK]<sop><|user|>\n<|begin_of_audio|><|audio_0|><|audio_95|><|end_of_audio|>"
    assert prompt.markup_ids(text) == with_control(text)


def test_a_conversation_has_the_ids_of_the_published_program(prompt):
    heard = (tiny.FIRST_CODE + 3, tiny.FIRST_CODE + 7)
    said = with_control("the <|audio_1|><|audio_2|>and<|audio_3|>")
    pieces = [
        *prompt.header(""),
        *prompt.item(HistoryItem(key="1", role="user", parts=(), token_ids=heard)),
        *prompt.item(HistoryItem(key="2", role="assistant", parts=(), token_ids=tuple(said))),
        *prompt.item(HistoryItem(key="3", role="user", parts=(TextPart("the end"),))),
        *prompt.open_response(),
    ]
    opening = "<|assistant|>streaming_transcription\n"
    wanted = with_control(
        f"[gMASK]<sop><|system|>\n{TASK}<|user|>\n<|audio_3|><|audio_7|>{opening}"
    )
    wanted += said + with_control(f"<|user|>\nthe end{opening}")
    assert ids_of(prompt, pieces) == wanted
    # The end that the model writes is the beginning of the next message.
    assert prompt.end_ids == tuple(with_control("<|user|>"))
    assert prompt.close_response(model_wrote_end=True) == []
    assert prompt.close_response(model_wrote_end=False) == [Markup("<|user|>")]


def tones(seconds: float) -> np.ndarray:
    """Every 80 ms another one, of another level."""
    rng, n = np.random.default_rng(3), round(16_000 * seconds)
    hz, level = (np.repeat(x, 1280)[:n] for x in 10 ** rng.uniform(2, 3.9, (2, n // 1280 + 1)))
    return (level * np.sin(2 * np.pi * np.cumsum(hz) / 16_000)).astype(np.int16)


@pytest.mark.parametrize("seconds", [0.03, 1.0, 7.77, 30.0])
def test_speech_has_the_codes_of_the_restated_encoder(path, seconds):
    pcm = tones(seconds)
    ears = GlmEars(path / TOKENIZER, tiny.FIRST_CODE, 1, 2)
    codes = ears.codes(pcm)
    assert codes == reference.codes(path / TOKENIZER, pcm)
    assert len(codes) == -(-len(pcm) // 1280) and len(set(codes)) >= min(5, len(codes))
    assert list(ears.ids(pcm)) == [1, *(tiny.FIRST_CODE + code for code in codes), 2]


def test_long_speech_is_heard_in_parts(path):
    pcm = tones(33.0)
    ears = GlmEars(path / TOKENIZER, tiny.FIRST_CODE, 1, 2)
    codes = ears.codes(pcm)
    assert len(codes) == 375 + 38
    assert codes[:375] == reference.codes(path / TOKENIZER, pcm[: 30 * 16_000])
    assert ears.ids(pcm[:0]) == []


def test_ears_are_on_the_device_of_the_thinker(path):
    ears = GlmEars(path / TOKENIZER, tiny.FIRST_CODE, 1, 2)
    ears.move("meta")
    assert {tensor.device.type for tensor in ears._encoder.state_dict().values()} == {"meta"}


def test_facts_are_those_of_the_checkpoint(path):
    facts = model_facts(path)
    assert (facts.own_voice, facts.voices) == (True, (VOICE,))
    assert facts.stages == ("thinker", "vocoder")
    assert (facts.vocab_size, facts.context_tokens) == (tiny.VOCAB, 2048)
    assert facts.kv_values == 2 * tiny.LAYERS * tiny.GROUPS * 16


def test_what_is_missing_is_named(path, tmp_path):
    other = tiny.build(tmp_path / "other")
    for file in DECODER_FILES:
        (other / DECODER / file).rename(other / "away")
        with pytest.raises(BadInputError, match=f"lacks the file {DECODER}/{file}"):
            model_facts(other)
        (other / "away").rename(other / DECODER / file)
    (other / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {}}))
    with pytest.raises(BadInputError, match=r"not GLM-4-Voice.*--recogniser"):
        model_facts(other)
