"""Models with random weights: their sizes, what their weights do, and where responses end."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTextConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeForConditionalGeneration,
    Qwen3OmniMoeThinkerTextModel,
)

from benchmark.load.config import LoadConfig
from benchmark.load.point import response_lengths
from benchmark.load.server import command
from lab.random_model.folder import Facts, ensure_made, is_random_model, make
from lab.random_model.vocoder import load_random
from lab.random_model.weights import end_with_text, fan_in, fill, speak_words_only
from sglang_live.models.checkpoint_files import check_checkpoint
from sglang_live.models.qwen3_omni.family import Qwen3OmniSpec
from sglang_live.models.qwen3_omni.parts import _talker_config

N_EXPERTS, TOP_K, N_STREAMS = 128, 8, 32
PAD, END = 7, 5


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "published"
    return ensure_made(folder, "published")


def _n_parameters(module: nn.Module) -> float:
    return sum(weight.numel() for weight in module.parameters()) / 1e9


def test_the_published_model_has_the_parameters_of_its_checkpoint(published):
    with torch.device("meta"):
        model = Qwen3OmniMoeForConditionalGeneration(AutoConfig.from_pretrained(published))
    thinker = model.thinker
    counts = [thinker.model, thinker.lm_head, thinker.audio_tower, thinker.visual, model.talker]
    expected = [30.22, 0.311, 0.648, 0.539, 3.325]
    assert [_n_parameters(part) for part in counts] == pytest.approx(expected, rel=0.01)
    spec = Qwen3OmniSpec.load(published)
    assert spec.kv_values * 2 == 98_304  # bytes of a token's KV
    assert (spec.codec_pad_id, spec.codec_eos_id, spec.codec_think_eos_id) == (2148, 2150, 2157)
    assert dict(spec.speakers) == {"chelsie": 2301, "ethan": 2302, "aiden": 2303}
    talker = _talker_config(json.loads((published / "config.json").read_text()))
    assert (talker["num_experts"], talker["num_experts_per_tok"]) == (N_EXPERTS, 6)
    assert talker["talker"]["thinker_vocab_size"] == 152_064


def test_a_server_accepts_the_folder_and_runs_it_in_the_laboratory(published):
    check_checkpoint(published)
    given = command(str(published), "off", 1, ())
    assert "lab.launch_server" in given
    assert "sglang_live.launch_server" in command("demo", "off", 1, ())
    assert not is_random_model(published.parent)


def test_lengths_are_drawn_for_a_random_model_by_its_frames_per_token(published):
    config = LoadConfig(drawn_replies=True, model_path=str(published))
    lengths = response_lengths(config, np.array([8.0]))
    assert lengths.draw_tokens(np.random.default_rng(1)) == round(100 / 3.7)
    with pytest.raises(ValueError, match="needs demo-random"):
        replace(config, model_path="demo")


def _narrow_thinker() -> Qwen3OmniMoeThinkerTextModel:
    """As deep and with as many experts as the published one."""
    config = Qwen3OmniMoeTextConfig(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=16,
        moe_intermediate_size=16,
        num_hidden_layers=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=N_EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]},
    )
    return Qwen3OmniMoeThinkerTextModel(config).eval()


@torch.no_grad()
def test_a_batch_reads_nearly_as_many_experts_as_if_they_were_drawn():
    model = _narrow_thinker()
    fill(model, seed=1)
    routed: list[torch.Tensor] = []
    for layer in model.layers:
        layer.mlp.gate.register_forward_hook(lambda _m, _x, out: routed.append(out[0]))
    noise = torch.Generator().manual_seed(3)
    ids = torch.randint(1024, (N_STREAMS, 12), generator=noise)
    states = model(input_ids=ids).last_hidden_state
    assert states.std().item() == pytest.approx(1.0, rel=0.05)
    # Of the newest token of each stream, as in a decode round.
    newest = [logits.view(N_STREAMS, 12, -1)[:, -1] for logits in routed]
    n_read = [len(logits.topk(TOP_K).indices.unique()) for logits in newest]
    drawn = N_EXPERTS * (1 - (1 - TOP_K / N_EXPERTS) ** N_STREAMS)
    assert len(n_read) == 48
    assert np.mean(n_read) > 0.85 * drawn
    assert min(n_read) > 0.7 * drawn
    # And not the same way in every layer.
    first, second = (set(logits[0].topk(TOP_K).indices.tolist()) for logits in newest[:2])
    assert first != second


def test_weights_depend_on_seed_and_name_alone():
    def made(seed: int) -> nn.Module:
        module = nn.ModuleDict({"a": nn.Linear(6, 4), "b": nn.Linear(6, 4), "n": nn.LayerNorm(4)})
        fill(module, seed)
        return module

    one, same, other = made(1), made(1), made(2)
    assert torch.equal(one["a"].weight, same["a"].weight)
    assert not torch.equal(one["a"].weight, one["b"].weight)
    assert not torch.equal(one["a"].weight, other["a"].weight)
    assert one["a"].bias.eq(0).all() and one["n"].weight.eq(1).all()


def test_quantised_weights_are_refused():
    module = nn.Module()
    module.codes = nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="codes is torch"):
        fill(module, seed=1)


@pytest.mark.parametrize(
    ("shape", "expected"), [((8, 3), 3), ((5, 8, 3), 3), ((8, 2, 3, 3), 18), ((8, 3, 2, 4, 4), 96)]
)
def test_fan_in_of_matrices_stacks_and_convolutions(shape, expected):
    assert fan_in(torch.empty(shape)) == expected


def test_only_words_are_spoken():
    head = torch.ones(6, 3)
    speak_words_only(head, Facts(spoken_ids=(1, 4)))
    assert head.any(dim=1).nonzero().flatten().tolist() == [1, 4]


def _ends(texts: list[list[int]], frame: int, ratio: float) -> list[bool]:
    """texts: what the row of each stream has, behind the first token."""
    rows = torch.full((len(texts), 8), PAD, dtype=torch.int32)
    for row, ids in zip(rows, texts, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    talker = {"tts_pad_token_id": PAD, "codec_eos_token_id": END}
    model = SimpleNamespace(
        rows=SimpleNamespace(text_ids=rows), config=SimpleNamespace(talker=talker)
    )
    logits = torch.zeros(len(texts), 10)
    end = partial(end_with_text, lambda *_: None, model, ratio)
    end(logits, torch.arange(len(texts)), torch.full((len(texts),), frame))
    return logits.argmax(dim=1).eq(END).tolist()


def test_a_response_ends_when_its_text_has_had_its_frames():
    one_token, three_tokens = [1], [1, 2, 3]  # the last is the end of the text
    nothing_yet: list[int] = []
    texts = [one_token, three_tokens, nothing_yet]
    assert _ends(texts, frame=0, ratio=2.5) == [False, False, False]
    assert _ends(texts, frame=2, ratio=2.5) == [False, False, False]
    assert _ends(texts, frame=3, ratio=2.5)[:2] == [True, False]
    assert _ends(texts, frame=7, ratio=2.5)[:2] == [True, False]
    assert _ends(texts, frame=8, ratio=2.5)[:2] == [True, True]


def test_a_talker_that_ends_before_its_text_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        Facts(frames_per_token=0.5)


def test_the_vocoder_sounds_as_loud_as_speech(tmp_path):
    make(tmp_path / "tiny", "tiny")
    module = load_random(lambda path: None, tmp_path / "tiny")
    codes = torch.randint(2048, (1, 16, 20), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert 0.05 < module(codes).std().item() < 0.5
