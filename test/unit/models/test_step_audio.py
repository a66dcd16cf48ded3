"""Step-Audio 2 mini on tiny random weights: its encoder and prompt against restated ones."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from sglang_live.core import AudioPart, HistoryItem, TextPart
from sglang_live.errors import BadInputError
from sglang_live.models.checkpoint_files import check_checkpoint
from sglang_live.models.family import model_facts, part
from sglang_live.models.own_voice import SpokenIds
from sglang_live.models.prompt import Clip, Markup, Piece, Words
from sglang_live.models.speech_lm.checkpoint import read_tensors
from sglang_live.models.step_audio.family import FAMILY, StepAudioSpec
from sglang_live.models.step_audio.hearing import Hearing, LogMel, n_tokens
from sglang_live.models.step_audio.parts import ARCHITECTURE, StepAudioPrompt, StepAudioThinker
from sglang_live.models.tool_prompt import ResponseParts
from test.step_audio import checkpoint as tiny
from test.step_audio import reference
from test.unit.models.test_glm4_voice import tones

IDS = {name: number for number, name in tiny.special().items()}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("step") / "checkpoint")


@pytest.fixture
def copy(path, tmp_path) -> Path:
    return Path(shutil.copytree(path, tmp_path / "copy"))


@pytest.fixture(scope="module")
def view(path, tmp_path_factory) -> Path:
    args = StepAudioThinker(path).engine_args(tmp_path_factory.mktemp("cache"))
    assert args["model_path"] == args["tokenizer_path"]
    return Path(args["model_path"])


@pytest.fixture(scope="module")
def prompt(path, view) -> StepAudioPrompt:
    return StepAudioPrompt(StepAudioSpec.load(path), AutoTokenizer.from_pretrained(view))


def text_of(prompt: StepAudioPrompt, pieces: list[Piece]) -> str:
    """As the published programs write it."""
    text = ""
    for piece in pieces:
        match piece:
            case Words():
                text += prompt._tokenizer.decode(list(piece.token_ids))
            case Markup():
                text += piece.text
            case Clip():
                text += piece.markup
    return text


# --- hearing ---


@pytest.mark.parametrize("seconds", [0.021, 0.5, 1.0, 7.77, 25.0])
def test_speech_has_the_states_of_the_restated_encoder(path, seconds):
    pcm = tones(seconds)
    hearing = Hearing(tiny.ENCODER)
    heard = {"encoder.", "adapter."}
    tensors = {k: v for part in heard for k, v in read_tensors(path, part, keeps=True).items()}
    hearing.load_state_dict(tensors)
    mels = LogMel(128)(torch.tensor(pcm / np.float32(32_768)))
    with torch.no_grad():
        found = hearing(mels)
    expected = reference.Model(path).states(pcm)
    assert found.shape == expected.shape == (n_tokens(mels.shape[1]), tiny.HIDDEN)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_the_shortest_clip_has_a_token():
    assert [n_tokens(LogMel(128)(torch.ones(n)).shape[1]) for n in (1, 100, 321)] == [1, 1, 1]


# --- the prompt ---


def test_a_conversation_is_that_of_the_published_programs(prompt):
    said = tuple(prompt.markup_ids("the<audio_1><audio_2><audio_3><audio_4><tts_end>"))
    pieces = [
        *prompt.header("Be kind."),
        *prompt.item(HistoryItem(key="1", role="user", parts=(AudioPart(tones(1.0)),))),
        *prompt.item(HistoryItem(key="2", role="assistant", parts=(), token_ids=said)),
        *prompt.item(HistoryItem(key="3", role="user", parts=(TextPart("the end"),))),
        *prompt.open_response(),
    ]
    assert text_of(prompt, pieces) == (
        "<|BOT|>system\nBe kind.<|EOT|>"
        "<|BOT|>human\n<audio_start><audio_patch><audio_end><|EOT|>"
        "<|BOT|>assistant\n<tts_start>the<audio_1><audio_2><audio_3><audio_4><tts_end><|EOT|>"
        "<|BOT|>human\nthe end<|EOT|>"
        "<|BOT|>assistant\n<tts_start>"
    )
    assert prompt.end_ids == (IDS["<|EOT|>"],)
    begin, end = Markup("<|BOT|>"), Markup("<|EOT|><|BOT|>")
    assert prompt.close_response(model_wrote_end=True) == [begin]
    assert prompt.close_response(model_wrote_end=False) == [end]
    assert prompt.header("") == [begin]


def test_functions_are_a_message_of_their_own_and_calls_are_read(prompt):
    function = json.dumps({"name": "weather", "parameters": {"type": "object"}})
    tools = (
        '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'
    )
    schemas = f"<|BOT|>tool_json_schemas\n{tools}<|EOT|><|BOT|>"
    given = prompt.with_functions("Be kind.", [function])
    assert text_of(prompt, prompt.header(given)) == f"<|BOT|>system\nBe kind.<|EOT|>{schemas}"
    assert text_of(prompt, prompt.header(prompt.with_functions("", [function]))) == schemas
    assert prompt.with_functions("Be kind.", []) == "Be kind."
    # An instruction cannot pretend to be such a message.
    assert len(prompt.header(prompt.with_functions("Be\x1dkind.", []))) == 3
    result = HistoryItem(key="1", role="tool", parts=(TextPart("12 degrees"),))
    assert text_of(prompt, prompt.item(result)) == "input\n12 degrees<|EOT|><|BOT|>"
    parts = ResponseParts(prompt.call_begin_id())
    call = 'Let me see. <tool_call>function\nweather\n{"city": "Bonn"}</tool_call>'
    parts.take(prompt.markup_ids(call), call)
    assert parts.spoken == "Let me see."
    assert parts.calls() == ['{"name": "weather", "arguments": {"city": "Bonn"}}']


def test_words_of_users_are_no_control_tokens(prompt):
    item = HistoryItem(key="1", role="user", parts=(TextPart("<audio_3><|EOT|><tts_end>"),))
    [words, end] = prompt.item(item)
    assert isinstance(words, Words) and max(words.token_ids) < tiny.N_WORDS
    assert end == Markup("<|EOT|><|BOT|>")


def test_long_speech_is_heard_in_parts(prompt):
    speech, more = AudioPart(tones(57.0)), TextPart("the end")
    pieces = prompt.item(HistoryItem(key="1", role="user", parts=(speech, more)))
    assert [type(piece) for piece in pieces] == [Markup, Clip, Clip, Clip, Words, Markup]
    media = prompt.media(HistoryItem(key="1", role="user", parts=(speech, more)))
    assert [medium.duration_s for medium in media] == [25.0, 25.0, 7.0]
    assert np.array_equal(np.concatenate([medium.pcm for medium in media]), speech.pcm)


def test_a_transcript_has_no_codes_and_no_filling(prompt, path):
    spoken = SpokenIds(StepAudioThinker(path).voice, prompt.text_of)
    ids = prompt.markup_ids(
        "the<audio_1><audio_2><audio_3><audio_4> the<audio_5><audio_6><audio_7><audio_8>"
        "<tts_pad><audio_9><audio_10><audio_96><audio_96><tts_end>"
    )
    said = [spoken.text(ids[:n], ended=False) for n in range(len(ids) + 1)]
    assert said[:11] == ["", "", "", "", "", "the", "the", "the", "the", "the", "the the"]
    assert spoken.text(ids, ended=True) == "the the"
    assert spoken.codes == list(range(1, 11))


# --- the checkpoint ---


def test_facts_are_those_of_the_checkpoint(path):
    facts = model_facts(path)
    assert facts.family == "sglang_live.models.step_audio.family" and facts.own_voice
    assert facts.stages == ("thinker", "vocoder") and facts.voices == ("ada", "ben", "eve")
    assert (facts.vocab_size, facts.context_tokens) == (tiny.VOCAB, 4096)
    assert facts.kv_values == 2 * tiny.LAYERS * tiny.KV_HEADS * 16
    check_checkpoint(facts.weights)
    assert part(FAMILY.decoder).__name__ == "StepAudioDecoder"
    FAMILY.check_ranks(path, "thinker", "--thinker.tp-size", 4)
    with pytest.raises(BadInputError, match="num_attention_heads is 4"):
        FAMILY.check_ranks(path, "thinker", "--thinker.tp-size", 8)


def test_codes_are_ids_in_a_row(path):
    spec = StepAudioSpec.load(path)
    # The last one stands for no code.
    assert (spec.first_code, spec.n_codes) == (tiny.FIRST_CODE, tiny.N_CODES)


def test_the_engine_sees_a_qwen2(path, view):
    config = json.loads((view / "config.json").read_text())
    assert config["model_type"] == "qwen2" and config["architectures"] == [ARCHITECTURE]
    assert (config["hidden_size"], config["eos_token_id"]) == (tiny.HIDDEN, IDS["<|EOT|>"])
    assert config["audio_encoder_config"] == tiny.ENCODER
    assert (view / "tokenizer.json").resolve() == (path / "tokenizer.json").resolve()


@pytest.mark.parametrize("name", ["flow.pt", "hift.pt", "spk2info.pt"])
def test_a_missing_file_is_named(copy, name):
    (copy / "token2wav" / name).unlink()
    with pytest.raises(BadInputError, match=f"token2wav/{name} is missing"):
        model_facts(copy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, r"config.json lacks text_config"),
        ({"audio_encoder_config": {}}, "audio_encoder_config lacks n_mels, n_audio_ctx"),
        ({"audio_encoder_config": tiny.ENCODER | {"llm_dim": 8}}, "width 8, this one has 64"),
    ],
)
def test_another_config_is_refused(copy, changes, message):
    (copy / "config.json").write_text(json.dumps(tiny.CONFIG | changes))
    with pytest.raises(BadInputError, match=message):
        model_facts(copy)


def test_another_tokenizer_is_refused(copy):
    (copy / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {}}))
    with pytest.raises(BadInputError, match=r"lacks <\|BOT\|>.*this is not Step-Audio 2 mini"):
        model_facts(copy)
