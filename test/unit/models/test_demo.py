"""The demo checkpoint: deterministic, and in the published layout."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoProcessor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeForConditionalGeneration,
)

from sglang_live.models.demo import build as demo
from sglang_live.models.demo.build import SPECIAL_TOKENS, build_tokenizer
from sglang_live.models.demo.location import DemoSize, default_directory


def digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()
    }


def test_building_twice_gives_the_same_bytes(demo_checkpoint, tmp_path):
    demo.build(tmp_path, DemoSize())
    assert digests(tmp_path) == digests(demo_checkpoint)


def test_transformers_loads_every_weight_and_the_processor(demo_checkpoint):
    model, info = Qwen3OmniMoeForConditionalGeneration.from_pretrained(
        demo_checkpoint, output_loading_info=True
    )
    assert not any(info.values()), info
    assert model.has_talker
    processor = AutoProcessor.from_pretrained(demo_checkpoint)
    assert processor.audio_token == "<|audio_pad|>"


def test_the_chat_template_has_a_place_for_every_clip(demo_checkpoint):
    processor = AutoProcessor.from_pretrained(demo_checkpoint)
    content = [{"type": "text", "text": "hear:"}, {"type": "input_audio"}, {"type": "audio_url"}]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    assert prompt == (
        "<|im_start|>user\nhear:"
        + 2 * "<|audio_start|><|audio_pad|><|audio_end|>"
        + "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_tokenizer_is_deterministic_and_lossless():
    first, second = build_tokenizer(1024), build_tokenizer(1024)
    assert first.get_vocab() == second.get_vocab()
    assert len(first) <= 1024
    assert first.convert_tokens_to_ids(SPECIAL_TOKENS) == list(range(len(SPECIAL_TOKENS)))
    text = "Zażółć 日本 🙂\n\ttabs and  spaces"
    assert first.decode(first.encode(text)) == text


@pytest.fixture
def builds(tmp_path, monkeypatch) -> list[Path]:
    """Where builds went, of builds that only write the last file."""
    went: list[Path] = []

    def build(directory: Path, size: DemoSize) -> None:
        went.append(directory)
        (directory / "config.json").write_text("{}")

    monkeypatch.setenv("SGLANG_LIVE_CACHE", str(tmp_path))
    monkeypatch.setattr(demo, "build", build)
    return went


def test_the_cached_model_is_built_once_and_found_by_its_recipe(builds, tmp_path):
    path = demo.ensure_built()
    assert path == demo.ensure_built() == default_directory()
    assert len(builds) == 1
    other = demo.ensure_built(DemoSize(talker_layers=3))
    assert other != path
    assert {p.name for p in tmp_path.iterdir()} == {path.name, other.name}


def test_concurrent_builds_end_with_one_model_and_no_leftovers(builds, tmp_path):
    with ThreadPoolExecutor(8) as racers:
        paths = set(racers.map(lambda _: demo.ensure_built(), range(16)))
    assert paths == {default_directory()}
    assert list(tmp_path.iterdir()) == [default_directory()]


def test_a_build_that_fails_leaves_no_model(tmp_path, monkeypatch):
    def build(directory: Path, size: DemoSize) -> None:
        (directory / "half.txt").touch()
        raise KeyError("oops")

    monkeypatch.setenv("SGLANG_LIVE_CACHE", str(tmp_path))
    monkeypatch.setattr(demo, "build", build)
    with pytest.raises(KeyError):
        demo.ensure_built()
    assert list(tmp_path.iterdir()) == []
