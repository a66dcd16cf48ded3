"""A checkpoint in parts: a saved part is loaded, a part of another model is refused."""

import pytest
import torch
from torch import nn

from training.demo.checkpoint import apart, load_part, save_part, together


def tower() -> nn.Module:
    model = nn.Module()
    model.code2wav, model.talker, model.thinker = (nn.Linear(2, 2) for _ in range(3))
    model.thinker.audio_tower = nn.Linear(2, 2)
    return model


def test_a_part_has_its_own_weights_and_no_others(tmp_path):
    one, other = tower(), tower()
    before = {name: weight.clone() for name, weight in other.state_dict().items()}
    save_part(one, "thinker", tmp_path)
    assert load_part(other, "thinker", tmp_path)
    for name, weight in other.state_dict().items():
        taken = name.startswith("thinker.") and "audio_tower" not in name
        expected = one.state_dict()[name].half().float() if taken else before[name]
        assert torch.equal(weight, expected), name


def test_a_part_that_is_not_there_changes_nothing(tmp_path):
    assert not load_part(tower(), "vocoder", tmp_path)


def test_a_part_of_another_model_is_refused(tmp_path):
    save_part(tower(), "hearing", tmp_path)
    other = tower()
    other.thinker.audio_tower = nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError, match="of another model"):
        load_part(other, "hearing", tmp_path)


def test_experts_are_separate_in_a_file_and_stacked_in_memory():
    names = ("gate_up_proj", "down_proj")
    shapes = ((3, 8, 5), (3, 5, 4))  # three experts of width 4 on 5 channels
    weights = {
        f"talker.layers.{layer}.mlp.experts.{name}": torch.randn(shape)
        for layer in range(2)
        for name, shape in zip(names, shapes, strict=True)
    }
    weights["talker.layers.0.mlp.gate.weight"] = torch.randn(3, 5)
    published = apart(weights)
    first = weights["talker.layers.1.mlp.experts.gate_up_proj"][2]
    assert torch.equal(published["talker.layers.1.mlp.experts.2.gate_proj.weight"], first[:4])
    assert torch.equal(published["talker.layers.1.mlp.experts.2.up_proj.weight"], first[4:])
    assert len(published) == 2 * 3 * 3 + 1
    again = together(published)
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())
