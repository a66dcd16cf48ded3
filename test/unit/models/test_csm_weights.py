"""CSM's weights into the talker's model: names, tables that are shared, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import CsmForConditionalGeneration

pytest.importorskip("sglang")
from sglang_live.models.csm.engine.talker import CsmBackbone
from sglang_live.models.speech_lm.code_predictor import CodePredictor
from sglang_live.models.speech_lm.sampler import Sampler
from test.csm import checkpoint as tiny

AUDIO = "backbone_model.embed_tokens.embed_audio_tokens.weight"
DEPTH_AUDIO = "depth_decoder.model.embed_tokens.weight"


class Stacked(nn.Linear):
    """Keeps which parts of it were loaded, as SGLang's layers take them."""

    def __init__(self):
        super().__init__(1, 1, bias=False)
        self.parts = []
        self.weight.weight_loader = lambda _, tensor, part: self.parts.append(part)


class SmallBackbone(nn.Module):
    """As much of the model as loading needs to know."""

    def __init__(self):
        super().__init__()
        config = tiny.config()
        depth = config.depth_decoder_config.to_dict()
        self.config = SimpleNamespace(
            vocab_size=tiny.VOCAB, codebook_size=tiny.CODES, live_recordings=[]
        )
        self.n_codes = tiny.N_CODES
        self.register_buffer("text_table", torch.zeros(tiny.TEXT_VOCAB, tiny.HIDDEN))
        self.codec_head = nn.Linear(tiny.HIDDEN, tiny.VOCAB, bias=False)
        self.code_predictor = CodePredictor(
            depth | {"num_code_groups": tiny.N_CODES, "vocab_size": tiny.CODES},
            sampler=Sampler(),
            talker_width=tiny.HIDDEN,
            llama_frequencies=torch.ones(4),
        )
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(tiny.VOCAB, tiny.HIDDEN),
                "layers": nn.ModuleList(self._layer() for _ in range(config.num_hidden_layers)),
                "norm": nn.RMSNorm(tiny.HIDDEN),
            }
        )
        self.model.embed_tokens = self.model["embed_tokens"]
        self.n_prepared = 0

    def _layer(self) -> nn.Module:
        out, down = (nn.Linear(n, tiny.HIDDEN, bias=False) for n in (tiny.HIDDEN, 96))
        return nn.ModuleDict(
            {
                "self_attn": nn.ModuleDict({"qkv_proj": Stacked(), "o_proj": out}),
                "mlp": nn.ModuleDict({"gate_up_proj": Stacked(), "down_proj": down}),
                "input_layernorm": nn.RMSNorm(tiny.HIDDEN),
                "post_attention_layernorm": nn.RMSNorm(tiny.HIDDEN),
            }
        )

    _load, _load_codes = CsmBackbone._load, CsmBackbone._load_codes
    _fill_voices = CsmBackbone._fill_voices

    def prepare(self) -> None:
        self.n_prepared += 1


@pytest.fixture(scope="module")
def published() -> dict[str, torch.Tensor]:
    """As sesame/csm-1b has them: the table of codes twice."""
    torch.manual_seed(0)
    weights = CsmForConditionalGeneration(tiny.config()).state_dict()
    return weights | {DEPTH_AUDIO: weights[AUDIO]}


def load(weights: dict[str, torch.Tensor]) -> SmallBackbone:
    model = SmallBackbone()
    CsmBackbone.load_weights(model, weights.items())
    return model


def test_every_weight_of_the_checkpoint_finds_its_place(published):
    model = load(published)
    assert model.n_prepared == 1
    tables = published[AUDIO].view(tiny.N_CODES, tiny.VOCAB, -1)
    assert torch.equal(model.model.embed_tokens.weight, tables[0])
    assert torch.equal(model.code_predictor.codec_embedding, tables[1:, : tiny.CODES])
    assert torch.equal(model.text_table, published["embed_text_tokens.weight"])
    assert torch.equal(model.codec_head.weight, published["lm_head.weight"])
    for layer in model.model["layers"]:
        assert sorted(layer["self_attn"]["qkv_proj"].parts) == ["k", "q", "v"]
        assert sorted(layer["mlp"]["gate_up_proj"].parts) == [0, 1]


@pytest.mark.parametrize("lacking", [AUDIO, DEPTH_AUDIO])
def test_one_table_of_codes_is_enough(published, lacking):
    once = {name: weight for name, weight in published.items() if name != lacking}
    both, one = load(published).code_predictor, load(once).code_predictor
    assert torch.equal(one.codec_embedding, both.codec_embedding)


def test_two_tables_that_differ_are_refused(published):
    changed = published | {DEPTH_AUDIO: published[AUDIO] + 1e-3}
    with pytest.raises(ValueError, match="codebooks' embeddings differ"):
        load(changed)


@pytest.mark.parametrize(
    "name",
    [
        "embed_text_tokens.weight",
        "lm_head.weight",
        "backbone_model.norm.weight",
        "backbone_model.layers.1.self_attn.k_proj.weight",
        "depth_decoder.codebooks_head.weight",
        "depth_decoder.model.inputs_embeds_projector.weight",
        "depth_decoder.model.layers.0.mlp.down_proj.weight",
        "depth_decoder.model.layers.0.mlp.up_proj.weight",
    ],
)
def test_a_missing_weight_is_named(published, name):
    weights = {other: weight for other, weight in published.items() if other != name}
    with pytest.raises(ValueError, match=r"checkpoint lacks weights of CSM: \["):
        load(weights)


def test_an_unknown_weight_is_named(published):
    with pytest.raises(ValueError, match=r"unknown weight backbone_model.extra.weight of CSM"):
        load(published | {"backbone_model.extra.weight": torch.zeros(1)})
