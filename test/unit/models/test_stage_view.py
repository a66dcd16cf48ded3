"""The directory in which SGLang sees only the talker."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers import AutoConfig

from sglang_live.models.qwen3_omni.parts import (
    TALKER_ARCHITECTURE,
    THINKER_EMBEDDING,
    talker_view,
)
from sglang_live.models.speech_lm.checkpoint import shards_with

SHARDS = {
    "a.safetensors": ["thinker.model.layers.0.mlp.gate.weight", "thinker.lm_head.weight"],
    "b.safetensors": [THINKER_EMBEDDING, "thinker.model.norm.weight"],
    "c.safetensors": ["talker.codec_head.weight", "code2wav.decoder.0.conv.weight"],
    "d.safetensors": ["code2wav.pre_transformer.norm.weight", "talkers.weight"],
}
OF_TALKER = {THINKER_EMBEDDING: "b.safetensors", "talker.codec_head.weight": "c.safetensors"}


@pytest.fixture(params=["with index", "without index"])
def checkpoint(request, tmp_path, demo_checkpoint) -> Path:
    """The demo model's configuration with weights of a few bytes, spread over shards."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    (path / "config.json").write_text((demo_checkpoint / "config.json").read_text())
    for shard, names in SHARDS.items():
        save_file({name: np.zeros(1, np.float32) for name in names}, path / shard)
    if request.param == "with index":
        weight_map = {name: shard for shard, names in SHARDS.items() for name in names}
        index = {"metadata": {}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


def index_of(view: Path) -> dict:
    return json.loads((view / "model.safetensors.index.json").read_text())["weight_map"]


def test_the_view_names_the_talkers_weights_and_links_their_shards_alone(checkpoint, cache):
    view = talker_view(checkpoint, cache)
    assert index_of(view) == OF_TALKER
    links = {path.name: path for path in view.glob("*.safetensors")}
    assert links.keys() == set(OF_TALKER.values())
    for name, link in links.items():
        assert link.is_symlink()
        assert link.resolve() == checkpoint / name


def test_the_config_is_one_of_the_talker_that_transformers_reads(checkpoint, cache):
    view = talker_view(checkpoint, cache)
    whole = json.loads((checkpoint / "config.json").read_text())
    config = AutoConfig.from_pretrained(view)
    text = whole["talker_config"]["text_config"]
    assert config.architectures == [TALKER_ARCHITECTURE]
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "head_dim"):
        assert getattr(config, name) == text[name], name
    assert config.num_experts == text["num_local_experts"]
    assert config.eos_token_id == whole["talker_config"]["codec_eos_token_id"]
    talker = json.loads((view / "config.json").read_text())["talker"]
    assert talker["thinker_vocab_size"] == whole["thinker_config"]["text_config"]["vocab_size"]
    assert "text_config" not in talker


def test_a_view_is_built_once(checkpoint, cache):
    view = talker_view(checkpoint, cache)
    made_ns = (view / "config.json").stat().st_mtime_ns
    assert talker_view(checkpoint, cache) == view
    assert (view / "config.json").stat().st_mtime_ns == made_ns
    assert list(cache.iterdir()) == [view]


def test_a_relative_or_linked_path_is_the_same_checkpoint(checkpoint, cache, monkeypatch):
    view = talker_view(checkpoint, cache)
    link = checkpoint.parent / "link"
    link.symlink_to(checkpoint)
    monkeypatch.chdir(checkpoint.parent)
    assert talker_view(link, cache) == talker_view(Path("checkpoint"), cache) == view


def test_another_config_gets_another_view(checkpoint, cache):
    before = talker_view(checkpoint, cache)
    os.utime(checkpoint / "config.json", ns=(1, 1))
    assert talker_view(checkpoint, cache) != before


def test_concurrent_builders_make_one_view_and_leave_nothing_behind(checkpoint, cache):
    with ThreadPoolExecutor(8) as builders:
        views = list(builders.map(lambda _: talker_view(checkpoint, cache), range(16)))
    assert len(set(views)) == 1
    assert list(cache.iterdir()) == [views[0]]
    assert index_of(views[0]) == OF_TALKER


def test_a_failed_view_leaves_nothing_behind(checkpoint, cache):
    (checkpoint / "config.json").write_text("{}")
    with pytest.raises(KeyError):
        talker_view(checkpoint, cache)
    assert list(cache.glob("*")) == []


def test_weights_are_found_by_the_beginning_of_their_names(checkpoint):
    assert shards_with(checkpoint, ("talker.",)) == {"talker.codec_head.weight": "c.safetensors"}
    assert shards_with(checkpoint, ("no.",)) == {}
