"""A checkpoint in parts: what is saved is loaded, and of another model nothing is."""

import pytest
import torch
from torch import nn

from training.demo.checkpoint import load_part, save_part


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
