"""Qwen3-TTS as a family: what a checkpoint says of itself, its prompts, and what SGLang sees."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig

from sglang_live.errors import BadInputError
from sglang_live.model_source import ModelSource
from sglang_live.models.family import family_at, model_facts
from sglang_live.models.qwen3_tts.parts import TALKER_ARCHITECTURE, TTSTalker, talker_view
from test.qwen3_tts import checkpoint as tiny

TALKER = tiny.TALKER


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("qwen3-tts"))


@pytest.fixture
def changed(checkpoint, tmp_path):
    """Returns a copy whose config has other values."""

    def change(talker: dict | None = None, **config) -> Path:
        for file in checkpoint.iterdir():
            (tmp_path / file.name).symlink_to(file)
        document = json.loads((checkpoint / "config.json").read_text()) | config
        document["talker_config"] |= talker or {}
        (tmp_path / "config.json").unlink()
        (tmp_path / "config.json").write_text(json.dumps(document))
        return tmp_path

    return change


@pytest.fixture(scope="module")
def talker(checkpoint) -> TTSTalker:
    return TTSTalker(checkpoint)


# --- facts ---


def test_it_speaks_for_others_with_the_voices_of_its_checkpoint(checkpoint):
    facts = model_facts(checkpoint)
    assert facts.family == "sglang_live.models.qwen3_tts.family"
    assert facts.stages == ("talker", "vocoder") and facts.talker_reads_text
    assert facts.voices == ("vivian", "eric")


def test_it_is_served_alone_but_thinks_for_no_recogniser(checkpoint, tmp_path):
    facts = ModelSource(path=str(checkpoint)).load(tmp_path)
    assert facts.weights == checkpoint and not facts.has_thinker
    cascade = ModelSource(path=str(checkpoint), recogniser="moonshine", voice="hibari")
    with pytest.raises(BadInputError, match=r"--recogniser: .* only speaks: .* --voice-model"):
        cascade.load(tmp_path)


@pytest.mark.parametrize(
    ("talker", "config", "message"),
    [
        ({"spk_id": {}}, {}, r"\(custom_voice\) has no voices of its own"),
        ({}, {"tts_model_type": "base"}, "lacks 'speaker_encoder_config'"),
        (
            {},
            {"tts_model_type": "base", "speaker_encoder_config": {"enc_dim": 7}},
            r"enc_dim is 7, not the talker's hidden_size, 96",
        ),
        ({"spk_id": None}, {"tts_model_type": "voice_design"}, "no voices of its own"),
        ({}, {"tokenizer_type": "qwen3_tts_tokenizer_25hz"}, "its codec is .*25hz"),
        ({"spk_is_dialect": {"eric": "cantonese"}}, {}, "lacks 'cantonese'"),
    ],
)
def test_checkpoints_that_cannot_speak_are_refused_with_the_reason(
    changed, talker, config, message
):
    path = changed(talker, **config)
    with pytest.raises(BadInputError, match=message):
        model_facts(path)


def test_a_checkpoint_without_its_codec_is_refused(changed):
    path = changed()
    (path / "speech_tokenizer").unlink()
    with pytest.raises(BadInputError, match=r"speech_tokenizer/config.json is missing"):
        model_facts(path)


def test_ranks_must_divide_the_talkers_heads(checkpoint):
    family = family_at(model_facts(checkpoint).family)
    family.check_ranks(checkpoint, "talker", "--talker.tp-size", 2)
    family.check_ranks(checkpoint, "vocoder", "--vocoder.tp-size", 3)
    with pytest.raises(BadInputError, match=r"--talker.tp-size.*num_attention_heads is 4"):
        family.check_ranks(checkpoint, "talker", "--talker.tp-size", 3)


# --- prompts ---


def test_a_prompt_is_role_language_speaker_and_first_token(talker):
    ids, role = talker._ids, talker._role
    nothink, begin, end = (
        TALKER[f"codec_{name}_id"] for name in ("nothink", "think_bos", "think_eos")
    )
    assert len(role) == 3
    assert talker.response("Vivian", 7) == [
        *(ids.text + token for token in role),
        ids.pad + nothink,
        ids.pad + begin,
        ids.pad + end,
        ids.pad + TALKER["spk_id"]["vivian"],
        ids.bos,
        ids.start + 7,
    ]


def test_a_speaker_of_a_dialect_speaks_it(talker):
    ids = talker._ids
    codes = [i - ids.pad for i in talker.response("eric", 7) if ids.pad <= i < ids.bos]
    dialect = TALKER["codec_language_id"]["sichuan_dialect"]
    assert codes[0] == TALKER["codec_think_id"] and codes[2] == dialect and len(codes) == 5


def test_an_unknown_voice_is_refused_with_the_known_ones(talker):
    with pytest.raises(BadInputError, match=r"'anna' is not one of \('vivian', 'eric'\)"):
        talker.response("anna", 7)


def test_letters_of_the_checkpoints_languages_are_spoken(talker):
    assert talker.reads.style.scripts == {"LATIN", "CJK"}
    im_start = talker._role[0]
    assert im_start not in talker.reads.encode("<|im_start|>")


# --- what SGLang sees ---


def test_the_view_is_a_dense_qwen3_over_codec_ids(checkpoint, tmp_path):
    view = talker_view(checkpoint, tmp_path)
    config = AutoConfig.from_pretrained(view)
    assert config.architectures == [TALKER_ARCHITECTURE] and config.model_type == "qwen3"
    assert (config.vocab_size, config.head_dim) == (TALKER["vocab_size"], TALKER["head_dim"])
    assert config.eos_token_id == TALKER["codec_eos_token_id"]
    assert config.rope_parameters["rope_theta"] == TALKER["rope_theta"]
    assert "mrope_section" not in config.rope_parameters
    with safe_open(view / "model.safetensors", "pt") as weights:
        index = json.loads((view / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(weights.keys())


@torch.no_grad()
def test_the_predictor_behind_a_projection_has_the_codes_of_the_reference(checkpoint):
    pytest.importorskip("sglang")
    from sglang_live.models.qwen3_tts.engine.talker import PREDICTOR_TEMPERATURE, TOP_K
    from sglang_live.models.speech_lm.code_predictor import CodePredictor
    from sglang_live.models.speech_lm.engine.weights import load_predictor_weight
    from sglang_live.models.speech_lm.sampler import Sampler
    from test.qwen3_tts.reference import Reference

    reference = Reference(checkpoint)
    predictor = CodePredictor(
        tiny.PREDICTOR,
        sampler=Sampler(top_k=TOP_K),
        temperature=PREDICTOR_TEMPERATURE,
        talker_width=tiny.HIDDEN,
    )
    params = {f"code_predictor.{name}": weight for name, weight in predictor.named_parameters()}
    for name, weight in reference._weights.items():
        if name.startswith("talker.code_predictor."):
            load_predictor_weight(predictor, params, name.removeprefix("talker."), weight)
    predictor.prepare()
    hidden = torch.randn(6, tiny.HIDDEN, generator=torch.Generator().manual_seed(0))
    first = list(range(6))
    codes, embeds = predictor(hidden, reference._code(first), None, None)
    for n, code in enumerate(first):
        expected, summed = reference._residual(hidden[n], code)
        assert codes[n].tolist() == expected
        torch.testing.assert_close(reference._code([code])[0] + embeds[n], summed)
    assert len(codes.unique()) > 20, "the case must not be trivial"
