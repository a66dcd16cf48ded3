"""Ids and sizes of a checkpoint directory, and errors of malformed ones."""

import json
from pathlib import Path

import pytest

from sglang_live.errors import BadInputError
from sglang_live.models.demo.location import TRAINED
from sglang_live.models.qwen3_omni.family import Qwen3OmniSpec


@pytest.fixture
def directory(tmp_path, demo_checkpoint) -> Path:
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text((demo_checkpoint / name).read_text())
    return tmp_path


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_demo_models_spec_matches_its_tokenizer(demo_spec, demo_checkpoint):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_checkpoint)
    named = {
        "<|im_start|>": demo_spec.im_start_id,
        "<|im_end|>": demo_spec.im_end_id,
        "<|audio_pad|>": demo_spec.audio_pad_id,
        "<|image_pad|>": demo_spec.image_pad_id,
        "user": demo_spec.user_id,
        "assistant": demo_spec.assistant_id,
        "system": demo_spec.system_id,
    }
    assert {name: tokenizer.convert_tokens_to_ids(name) for name in named} == named
    assert demo_spec.thinker_vocab >= len(tokenizer)
    assert demo_spec.end_of_turn_ids == (demo_spec.im_end_id,)
    assert set(demo_spec.voices) == {"aiden", "chelsie", "ethan"}
    assert demo_spec.num_code_groups == 16


@pytest.mark.parametrize(
    ("end", "expected"), [([7, 9], (7, 9)), (7, (7,))], ids=["several ends", "one end"]
)
def test_a_response_may_have_several_end_tokens(directory, end, expected):
    edit(directory / "generation_config.json", eos_token_id=end)
    assert Qwen3OmniSpec.load(directory).end_of_turn_ids == expected


def test_without_a_generation_config_a_response_ends_like_a_message(directory):
    (directory / "generation_config.json").unlink()
    spec = Qwen3OmniSpec.load(directory)
    assert spec.end_of_turn_ids == (spec.im_end_id,)
    assert dict(spec.sampling) == {}


def test_sampling_follows_the_checkpoints_generation_config(directory):
    path = directory / "generation_config.json"
    path.write_text(json.dumps({"do_sample": True, "temperature": 0.7, "top_p": None, "top_k": 20}))
    assert dict(Qwen3OmniSpec.load(directory).sampling) == {"temperature": 0.7, "top_k": 20}
    edit(path, do_sample=False)
    assert dict(Qwen3OmniSpec.load(directory).sampling) == {"temperature": 0.0}


def test_voices_are_found_by_their_names_in_lower_case(directory):
    config = json.loads((directory / "config.json").read_text())
    edit(
        directory / "config.json",
        talker_config=config["talker_config"] | {"speaker_id": {"Ada": 3}},
    )
    assert dict(Qwen3OmniSpec.load(directory).speakers) == {"ada": 3}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM.*expected Qwen3Omni"),
        ({"architectures": None}, "expected Qwen3Omni"),
        ({"enable_audio_output": False}, "has no talker"),
        ({"talker_config": {}}, "config.json lacks 'accept_hidden_layer'"),
    ],
    ids=["other model", "no model", "no talker", "incomplete"],
)
def test_a_checkpoint_that_cannot_speak_is_refused_with_the_reason(directory, changes, complaint):
    edit(directory / "config.json", **changes)
    with pytest.raises(BadInputError, match=complaint):
        Qwen3OmniSpec.load(directory)


@pytest.mark.parametrize("text", [None, "{", "[]", '"text"'])
def test_a_config_that_is_not_a_json_object_is_refused_with_its_path(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadInputError, match=str(tmp_path / "config.json")):
        Qwen3OmniSpec.load(tmp_path)


@pytest.mark.parametrize(
    ("file", "processor", "sees"),
    [
        ("processor_config.json", {"image_processor": {"patch_size": 16}}, True),
        ("processor_config.json", {"image_processor": {"patch_size": 14}}, False),
        ("processor_config.json", {"image_processor": None}, False),
        ("preprocessor_config.json", {"patch_size": 16, "feature_size": 128}, True),
        ("preprocessor_config.json", {"feature_size": 128}, False),
        ("other.json", {}, False),
    ],
)
def test_a_model_sees_what_its_processor_cuts_for_its_tower(directory, file, processor, sees):
    (directory / file).write_text(json.dumps(processor))
    spec = Qwen3OmniSpec.load(directory)
    assert (spec.sees, spec.watches) == (sees, sees and file == "preprocessor_config.json")
    assert not Qwen3OmniSpec.load(TRAINED).sees


def test_a_model_without_a_vision_tower_sees_nothing(directory, demo_checkpoint):
    name = "processor_config.json"
    (directory / name).write_text((demo_checkpoint / name).read_text())
    assert Qwen3OmniSpec.load(directory).sees and Qwen3OmniSpec.load(directory).watches
    config = json.loads((directory / "config.json").read_text())
    edit(
        directory / "config.json", thinker_config=config["thinker_config"] | {"vision_config": None}
    )
    assert not Qwen3OmniSpec.load(directory).sees
