"""Loading is strict: every weight has a parameter, and every parameter its weight."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sglang_live.models.qwen3_omni.engine.talker import weight_names
from sglang_live.models.qwen3_omni.parts import THINKER_EMBEDDING
from sglang_live.models.speech_lm.code_predictor import CodePredictor
from sglang_live.models.speech_lm.engine.weights import load_talker_weights
from sglang_live.models.speech_lm.sampler import Sampler

PREDICTOR = {
    "vocab_size": 6,
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_code_groups": 3,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
EMBEDDING = torch.randn(5, 4)
NAMES = weight_names(0)


class SmallTalker(nn.Module):
    """As much of the talker as loading needs to know."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(num_experts=0)
        self.code_predictor = CodePredictor(PREDICTOR, sampler=Sampler())
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(6, 4)})
        self.codec_head = nn.Linear(4, 6, bias=False)


def published() -> dict[str, torch.Tensor]:
    """A checkpoint of the small talker, in the names and shapes of the published one."""
    layer = "code_predictor.model.layers.0."
    shapes = {
        "codec_head.weight": (6, 4),
        "model.codec_embedding.weight": (6, 4),
        "code_predictor.model.norm.weight": (4,),
        layer + "input_layernorm.weight": (4,),
        layer + "post_attention_layernorm.weight": (4,),
        **{layer + f"self_attn.{x}_proj.weight": (4, 4) for x in "qkvo"},
        **{layer + f"self_attn.{x}_norm.weight": (4,) for x in "qk"},
        layer + "mlp.gate_proj.weight": (8, 4),
        layer + "mlp.up_proj.weight": (8, 4),
        layer + "mlp.down_proj.weight": (4, 8),
    }
    for step in range(2):
        shapes[f"code_predictor.model.codec_embedding.{step}.weight"] = (6, 4)
        shapes[f"code_predictor.lm_head.{step}.weight"] = (6, 4)
    weights = {f"talker.{name}": torch.randn(shape) for name, shape in shapes.items()}
    return weights | {THINKER_EMBEDDING: EMBEDDING}


def test_a_complete_checkpoint_fills_every_parameter():
    model, weights = SmallTalker(), published()
    for weight in model.parameters():
        weight.data.fill_(torch.nan)
    embedding = load_talker_weights(model, weights.items(), NAMES)
    assert not any(weight.isnan().any() for weight in model.parameters())
    assert torch.equal(embedding, EMBEDDING)
    table = weights["talker.model.codec_embedding.weight"]
    assert torch.equal(model.model["embed_tokens"].weight, table)
    rows = [
        weights[f"talker.code_predictor.model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"
    ]
    assert torch.equal(model.code_predictor.layers[0].qkv_proj.weight, torch.cat(rows))


def test_weights_of_other_parts_are_skipped():
    weights = published() | {"thinker.lm_head.weight": EMBEDDING, "code2wav.x": EMBEDDING}
    load_talker_weights(SmallTalker(), weights.items(), NAMES)


@pytest.mark.parametrize(
    "name", ["talker.codec_head.bias", "talker.code_predictor.model.layers.7.mlp.up_proj.weight"]
)
def test_an_unknown_weight_is_an_error_that_names_it(name):
    weights = published() | {name: torch.zeros(1)}
    with pytest.raises(ValueError, match=f"unknown talker weight {name}"):
        load_talker_weights(SmallTalker(), weights.items(), NAMES)


@pytest.mark.parametrize(
    ("absent", "named"),
    [
        ("talker.codec_head.weight", "codec_head.weight"),
        ("talker.code_predictor.model.norm.weight", "code_predictor.norm.weight"),
        (THINKER_EMBEDDING, THINKER_EMBEDDING),
    ],
)
def test_a_missing_weight_is_an_error_that_names_it(absent, named):
    weights = published()
    del weights[absent]
    with pytest.raises(ValueError, match=f"lacks talker weights: .*{named}"):
        load_talker_weights(SmallTalker(), weights.items(), NAMES)


@pytest.mark.parametrize(
    "absent",
    [
        "talker.code_predictor.model.layers.0.self_attn.k_proj.weight",
        "talker.code_predictor.model.layers.0.mlp.up_proj.weight",
        "talker.code_predictor.lm_head.1.weight",
    ],
)
def test_a_missing_part_of_a_stacked_weight_is_an_error(absent):
    weights = published()
    del weights[absent]
    with pytest.raises(ValueError, match="lacks talker weights"):
        load_talker_weights(SmallTalker(), weights.items(), NAMES)
