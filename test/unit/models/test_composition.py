"""A cascade's checkpoint: composed of a language model and fetched parts, or refused."""

import json
import shutil
from pathlib import Path

import pytest

from sglang_live.errors import BadInputError
from sglang_live.model_source import ModelSource
from sglang_live.models import composition
from sglang_live.models.cascade.parts import load_talker
from sglang_live.models.composition import compose
from sglang_live.models.demo.location import TRAINED
from sglang_live.models.family import family_at, model_facts
from test.qwen3_tts import checkpoint as qwen3_tts

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "num_attention_heads": 6,
}


@pytest.fixture
def llm(tmp_path) -> Path:
    path = tmp_path / "llm"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return path


@pytest.fixture
def fetched(tmp_path, monkeypatch) -> list[str]:
    """Names of the packages that were fetched."""
    names: list[str] = []

    def fetch(package, *, cache, report):
        names.append(package.name)
        return tmp_path / package.name

    monkeypatch.setattr(composition, "fetch", fetch)
    return names


def test_a_cascade_is_a_checkpoint_of_its_family(llm, fetched, tmp_path):
    lines: list[str] = []
    path = compose(llm, "moonshine", "hibari", tmp_path / "cache", lines.append)
    facts = model_facts(path)
    assert facts.family == "sglang_live.models.cascade.family"
    assert facts.stages == ("thinker", "vocoder") and facts.weights == llm
    assert (facts.vocab_size, facts.context_tokens, facts.voices) == (128, 512, ("heart",))
    assert fetched == ["moonshine-voice", "hibari-tts"]
    # The licence of what is fetched is printed.
    assert any("MIT" in line for line in lines) and any("Apache-2.0" in line for line in lines)
    assert compose(llm, "moonshine", "hibari", tmp_path / "cache", lines.append) == path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"max_position_embeddings": "many"}, "lacks max_position_embeddings"),
    ],
)
def test_models_that_hold_no_conversation_are_refused(llm, fetched, tmp_path, change, message):
    (llm / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(BadInputError, match=message):
        compose(llm, "moonshine", "hibari", tmp_path, print)
    assert fetched == []


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_directory_without_a_file_is_refused_by_name(llm, fetched, tmp_path, file):
    (llm / file).unlink()
    with pytest.raises(BadInputError, match=r"tokenizer|chat template|config\.json"):
        compose(llm, "moonshine", "hibari", tmp_path, print)
    assert fetched == []


def test_unknown_parts_are_refused_with_the_known_ones(llm, fetched, tmp_path):
    with pytest.raises(BadInputError, match="no recogniser 'ears': neither a path nor one of moon"):
        compose(llm, "ears", "hibari", tmp_path, print)
    with pytest.raises(BadInputError, match="no voice '/mouth': neither a path nor one of hibari"):
        compose(llm, "moonshine", "/mouth", tmp_path, print)
    assert fetched == []


def test_one_part_without_the_other_is_refused():
    with pytest.raises(BadInputError, match="belong together"):
        ModelSource(path="/models/m", recogniser="moonshine")
    ModelSource(path="cascade", recogniser="moonshine")
    with pytest.raises(BadInputError, match="needs --recogniser"):
        ModelSource(path="cascade", language="de")


def test_numbers_of_ranks_that_do_not_divide_the_heads_are_refused(llm, fetched, tmp_path):
    path = compose(llm, "moonshine", "hibari", tmp_path, print)
    family = family_at(model_facts(path).family)
    family.check_ranks(path, "thinker", "--thinker.tp-size", 2)
    with pytest.raises(BadInputError, match="num_attention_heads is 6"):
        family.check_ranks(path, "thinker", "--thinker.tp-size", 4)
    with pytest.raises(BadInputError, match="from 1"):
        family.check_ranks(path, "thinker", "--thinker.tp-size", 0)


def test_a_composed_cascade_is_no_checkpoint(llm, fetched, tmp_path):
    """Its config names code: a directory from elsewhere must not."""
    path = compose(llm, "moonshine", "hibari", tmp_path, print)
    with pytest.raises(BadInputError, match="composed cascade"):
        ModelSource(path=str(path)).load(tmp_path)


def test_a_size_of_the_vocabulary_need_not_be_divided(llm, fetched, tmp_path):
    (llm / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 129}))
    path = compose(llm, "moonshine", "hibari", tmp_path, print)
    family_at(model_facts(path).family).check_ranks(path, "thinker", "--tp-size", 2)


# --- a speaking language model as voice ---


@pytest.fixture(scope="module")
def speaker(tmp_path_factory) -> Path:
    return qwen3_tts.build(tmp_path_factory.mktemp("speaker"))


def test_a_speaking_language_model_takes_the_voices_place(llm, fetched, speaker, tmp_path):
    path = compose(llm, "moonshine", str(speaker), tmp_path / "cache", print)
    facts = model_facts(path)
    assert facts.family == "sglang_live.models.cascade.spoken"
    assert facts.stages == ("thinker", "talker", "vocoder") and facts.talker_reads_text
    assert facts.voices == ("vivian", "eric") and facts.weights == llm
    assert fetched == ["moonshine-voice"]
    family = family_at(facts.family)
    assert family.voice is None
    assert load_talker(path).voices == facts.voices
    family.check_ranks(path, "thinker", "--thinker.tp-size", 3)
    with pytest.raises(BadInputError, match="num_attention_heads is 4"):
        family.check_ranks(path, "talker", "--talker.tp-size", 3)


def test_a_model_that_speaks_for_its_own_thinker_alone_is_refused(llm, fetched, tmp_path):
    with pytest.raises(BadInputError, match="own thinker alone: give it as --model-path"):
        compose(llm, "moonshine", str(TRAINED), tmp_path, print)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: (path / "config.json").write_text("{"), r"cannot read .*config\.json"),
        (lambda path: (path / "model.safetensors").write_bytes(b"cut"), "cut short"),
        (lambda path: (path / "speech_tokenizer" / "config.json").unlink(), "is missing"),
        (lambda path: (path / "config.json").write_text("{}"), "no voice"),
        (lambda path: (path / "config.json").unlink(), "no voice"),
    ],
    ids=["config", "weights", "codec", "another model", "no model"],
)
def test_a_directory_that_cannot_speak_is_refused_by_name(
    llm, fetched, speaker, tmp_path, spoil, message
):
    spoilt = tmp_path / "spoilt"
    shutil.copytree(speaker, spoilt)
    spoil(spoilt)
    with pytest.raises(BadInputError, match=f"(?=.*spoilt)(?=.*{message})"):
        compose(llm, "moonshine", str(spoilt), tmp_path / "cache", print)
