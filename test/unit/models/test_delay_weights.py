"""Weights of families whose class draws frames into their models: places, and what is refused."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("sglang")
from sglang_live.models.chatterbox.engine.talker import ChatterboxT3
from sglang_live.models.cosyvoice.engine.talker import CosyVoiceLM
from sglang_live.models.higgs_v2.engine.talker import HiggsBackbone
from sglang_live.models.moss_tts.engine.talker import MossBackbone
from sglang_live.models.speech_lm.delay import Delay
from sglang_live.models.zonos.engine.talker import BOOK, ZonosBackbone
from test.chatterbox import checkpoint as tiny_chatterbox
from test.cosyvoice import checkpoint as tiny_cosyvoice
from test.higgs_v2 import checkpoint as tiny_higgs
from test.moss_tts import checkpoint as tiny_moss
from test.zonos import checkpoint as tiny_zonos

STACKED = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
)


class StandIn(nn.Module):
    """As much of a model as loading needs: parameters by name, which keep what they were given."""

    def __init__(self, family, shapes: dict[str, tuple[int, ...]], **attributes):
        super().__init__()
        self.given: dict[str, list] = {}
        self.family = family
        self.model = SimpleNamespace(untold=torch.zeros(0))
        self._params = {}
        for name, shape in shapes.items():
            self._params[name] = weight = nn.Parameter(torch.zeros(shape))
            weight.weight_loader = self._keeper(name)
        for name, value in attributes.items():
            setattr(self, name, value)
        self.codec_head = SimpleNamespace(weight=self._params["codec_head.weight"])
        self.is_prepared = False

    def _keeper(self, name: str):
        def keep(param, tensor, *shard):
            self.given.setdefault(name, []).append((tensor.clone(), *shard))

        return keep

    def named_parameters(self, *_, **__):
        return self._params.items()

    def prepare(self) -> None:
        self.is_prepared = True

    def _embed_frames(self, codes):
        return torch.ones(1, self.voices.shape[1])

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattribute__("family"), name).__get__(self)


def stacked(names: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Names of parameters from those of a Llama's weights."""
    found = {}
    for name, shape in names.items():
        for joined, parts in STACKED:
            for part in parts:
                name = name.replace(f".{part}.", f".{joined}.")
        found[name] = shape
    return found


def higgs() -> tuple[StandIn, dict[str, torch.Tensor]]:
    weights = tiny_higgs.model(48).state_dict()
    renamed = {
        name.replace("audio_lm_head", "codec_head"): tuple(weight.shape)
        for name, weight in weights.items()
        if not name.startswith(("model.embed_tokens", "model.embed_audio"))
    }
    renamed["model.embed_tokens.weight"] = (1, 1)
    return StandIn(
        HiggsBackbone,
        stacked(renamed),
        text_table=torch.zeros(tiny_higgs.TEXT_VOCAB, tiny_higgs.HIDDEN),
        voices=torch.zeros(1, tiny_higgs.HIDDEN),
        n_codes=tiny_higgs.N_BOOKS,
        config=SimpleNamespace(live_recordings=[]),
        delay=Delay(n_books=4, n_codes=64, begin_id=64, end_id=65),
    ), weights


def moss() -> tuple[StandIn, dict[str, torch.Tensor]]:
    weights = tiny_moss.model(64).state_dict()
    renamed = {
        name.replace("language_model.", "model."): tuple(weight.shape)
        for name, weight in weights.items()
        if not name.startswith(("emb_ext", "lm_heads"))
    }
    renamed["codec_head.weight"] = (1, 1)
    config = SimpleNamespace(
        live_recordings=[],
        n_books=tiny_moss.N_BOOKS,
        n_codes=tiny_moss.CODES,
        vocab_size=tiny_moss.N_IDS,
        hidden_size=tiny_moss.HIDDEN,
        slots=[tiny_moss.IDS[f"audio_assistant_{name}_slot"] for name in ("gen", "delay")],
    )
    text_table = torch.zeros(tiny_moss.TEXT_VOCAB, tiny_moss.HIDDEN)
    model = StandIn(MossBackbone, stacked(renamed), text_table=text_table, config=config)
    return model, weights


def zonos() -> tuple[StandIn, dict[str, torch.Tensor]]:
    weights = dict(tiny_zonos.model(128).state_dict())
    renamed = {}
    for name, weight in weights.items():
        if name.startswith("backbone."):
            name = name.replace("backbone.", "model.").replace(".in_proj.", ".qkv_proj.")
            name = name.replace(".fc1.", ".gate_up_proj.").replace(".fc2.", ".down_proj.")
            renamed[name.replace(".out_proj.", ".o_proj.")] = tuple(weight.shape)
    renamed |= {"model.embed_tokens.weight": (1, 1), "codec_head.weight": (1, 1)}
    config = SimpleNamespace(
        live_recordings=[],
        vocab_size=tiny_zonos.N_IDS,
        hidden_size=tiny_zonos.HIDDEN,
        head_dim=16,
        num_attention_heads=8,
        num_key_value_heads=4,
        prefix_conditioner=tiny_zonos.CONFIG["prefix_conditioner"],
    )
    table = torch.zeros(6, tiny_zonos.HIDDEN)
    model = StandIn(
        ZonosBackbone,
        renamed,
        config=config,
        text_table=torch.zeros(tiny_zonos.N_PHONEMES, tiny_zonos.HIDDEN),
        voices=table,
        delay=Delay(n_books=9, n_codes=1024, begin_id=1025, end_id=1024),
    )
    model.model.untold = table.clone()
    return model, weights


# What no model reads: the first one without a voice, the others never.
UNREAD = ("prefix_conditioner.conditioners.1.project", "cond_enc.", "tfmr.embed_tokens.")
UNREAD += ("text_head.", "llm.model.lm_head.")


def chatterbox() -> tuple[StandIn, dict[str, torch.Tensor]]:
    weights = dict(tiny_chatterbox.model(64).state_dict())
    renamed = {}
    for name, weight in weights.items():
        if name.startswith(("tfmr.layers.", "tfmr.norm.")):
            name = name.replace("tfmr.", "model.").replace(".self_attn.", ".mixer.")
            name = name.replace(".input_layernorm.", ".norm.")
            name = name.replace(".post_attention_layernorm.", ".norm2.")
            renamed[name] = tuple(weight.shape)
    renamed |= {"model.embed_tokens.weight": (1, 1), "codec_head.weight": (1, 1)}
    sizes, width = tiny_chatterbox.SIZES, tiny_chatterbox.WIDTH
    model = StandIn(
        ChatterboxT3,
        stacked(renamed),
        config=SimpleNamespace(live_voices=[], live_checkpoint=""),
        text_table=torch.zeros(sizes["text"], width),
        voices=torch.zeros(1, width),
    )
    model.model.text_places = torch.zeros(sizes["text_places"], width)
    model.model.speech_places = torch.zeros(sizes["speech_places"], width)
    return model, weights


def cosyvoice(version: int) -> tuple[StandIn, dict[str, torch.Tensor]]:
    weights = dict(tiny_cosyvoice.model(64, version).state_dict())
    renamed = {
        name.replace("llm.model.model.", "model."): tuple(weight.shape)
        for name, weight in weights.items()
        if name.startswith(("llm.model.model.layers.", "llm.model.model.norm."))
    }
    renamed |= {"model.embed_tokens.weight": (1, 1), "codec_head.weight": (1, 1)}
    model = StandIn(
        CosyVoiceLM,
        stacked(renamed),
        config=SimpleNamespace(prompt_ids=None if version == 2 else [6561, 6563]),
        text_table=torch.zeros(tiny_cosyvoice.TEXT_VOCAB, tiny_cosyvoice.WIDTH),
        voices=torch.zeros(2, tiny_cosyvoice.WIDTH),
        allowed=torch.zeros(len(weights["llm_decoder.weight"])),
    )
    return model, weights


FAMILIES = {
    "Higgs Audio v2": higgs,
    "MOSS-TTS": moss,
    "Zonos": zonos,
    "Chatterbox": chatterbox,
    "CosyVoice 2": partial(cosyvoice, 2),
    "CosyVoice 3": partial(cosyvoice, 3),
}


def load(model: StandIn, weights: dict[str, torch.Tensor]) -> StandIn:
    model.family.load_weights(model, weights.items())
    return model


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_every_weight_of_the_checkpoint_finds_its_place(family):
    model = load(*family())
    assert model.is_prepared
    for name, given in model.given.items():
        shards = [shard for _, *shard in given]
        if "qkv_proj" in name:
            assert sorted(shards) == [["k"], ["q"], ["v"]]
        elif "gate_up_proj" in name:
            assert sorted(shards) == [[0], [1]]
        else:
            assert shards == [[]]
    assert model.given.keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize(("name", "family"), FAMILIES.items(), ids=list(FAMILIES))
def test_missing_and_unknown_weights_are_named(name, family):
    model, weights = family()
    name = name.rstrip(" 23") if name.startswith("CosyVoice") else name
    for missing in (weight for weight in weights if not weight.startswith(UNREAD)):
        rest = {other: weight for other, weight in weights.items() if other != missing}
        with pytest.raises(ValueError, match=f"checkpoint lacks weights of {name}: "):
            load(family()[0], rest)
    with pytest.raises(ValueError, match=f"unknown weight model.extra.weight of {name}"):
        load(model, weights | {"model.extra.weight": torch.zeros(1)})


def test_the_slots_of_moss_are_a_book_behind_the_others_and_a_text_has_marks():
    model, weights = moss()
    load(model, weights)
    [(tables,)], [(heads,)] = (
        model.given[name] for name in ("model.embed_tokens.weight", "codec_head.weight")
    )
    size, slots = tiny_moss.CODES + 1, model.config.slots
    text = weights["language_model.embed_tokens.weight"]
    assert torch.equal(tables[2 * size : 3 * size], weights["emb_ext.2.weight"])
    assert torch.equal(tables[4 * size : 4 * size + 2], text[slots])
    assert torch.equal(heads[4 * size : 4 * size + 2], weights["lm_heads.0.weight"][slots])
    assert torch.equal(heads[:size], weights["lm_heads.1.weight"])
    marks = sum(weights[f"emb_ext.{book}.weight"][-1] for book in range(tiny_moss.N_BOOKS))
    assert (model.text_table - text - marks).abs().max() < 1e-5


def test_the_heads_of_zonos_may_be_padded_and_its_prompts_differ():
    model, weights = zonos()
    padded = torch.nn.functional.pad(weights["heads.1.weight"], (0, 0, 0, 7))
    load(model, weights | {"heads.1.weight": padded})
    [(heads,)] = model.given["codec_head.weight"]
    assert torch.equal(heads[BOOK : BOOK + 1025], weights["heads.1.weight"])
    assert not heads[BOOK + 1025 : 2 * BOOK].any()
    differ = (model.voices != model.model.untold).any(dim=1)
    # The speaker is told in neither prompt, the pitch and the frame of marks in both.
    assert differ.tolist() == [False, True, True, False, True, False]


def test_tables_and_marks_of_chatterbox_and_cosyvoice_are_those_of_the_checkpoint():
    model, weights = chatterbox()
    load(model, weights)
    places = weights["speech_pos_emb.emb.weight"]
    assert torch.equal(model.model.speech_places, places)
    assert torch.equal(model.model.text_places, weights["text_pos_emb.emb.weight"])
    assert torch.equal(model.text_table, weights["text_emb.weight"])
    assert torch.equal(model.voices[0], weights["speech_emb.weight"][6561] + places[0])
    for version in (2, 3):
        model, weights = cosyvoice(version)
        load(model, weights)
        marks = weights["speech_embedding.weight"][[6561, 6563]]
        if version == 2:
            marks = weights["llm_embedding.weight"]
            assert torch.equal(model.allowed, weights["llm_decoder.bias"])
        assert torch.equal(model.voices, marks)
        assert torch.equal(model.text_table, weights["llm.model.model.embed_tokens.weight"])
