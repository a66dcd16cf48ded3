"""The code predictor against transformers' own, on a tiny configuration with random weights."""

import pytest
import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration as Upstream,
)

from sglang_live.models.qwen3_omni.engine.talker import PREDICTOR_TOP_P as TOP_P
from sglang_live.models.qwen3_omni.engine.talker import TOP_K
from sglang_live.models.speech_lm.code_predictor import CodePredictor, traced
from sglang_live.models.speech_lm.engine.weights import load_predictor_weight
from sglang_live.models.speech_lm.sampler import Sampler, draws_of

HIDDEN, VOCAB, N_STEPS = 32, 90, 7


@pytest.fixture(scope="module")
def upstream() -> Upstream:
    config = Qwen3OmniMoeTalkerCodePredictorConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_code_groups=N_STEPS + 1,
        rms_norm_eps=1e-5,
    )
    model = Upstream(config).eval()
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            # About unit-sized signals, so that the codes depend on everything before them.
            scale = weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.3
            weight.copy_(torch.randn(weight.shape, generator=rng) * scale + (weight.dim() == 1))
    return model


@pytest.fixture(scope="module")
def ours(upstream) -> CodePredictor:
    predictor = CodePredictor(
        upstream.config.to_dict(), sampler=Sampler(top_k=TOP_K, top_p=TOP_P)
    ).eval()
    params = {f"code_predictor.{name}": weight for name, weight in predictor.named_parameters()}
    for weight in params.values():
        weight.data.fill_(torch.nan)
    for name, weight in upstream.state_dict().items():
        target = load_predictor_weight(predictor, params, f"code_predictor.{name}", weight)
        assert target in params, name
    assert not any(weight.isnan().any() for weight in params.values())
    predictor.prepare()
    return predictor


@pytest.fixture(scope="module")
def run(ours):
    return traced(ours)


def inputs(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    past_hidden, first_embed = torch.randn(2, n, HIDDEN, generator=rng)
    return past_hidden, first_embed


def draws_for(n: int, n_steps: int = N_STEPS) -> torch.Tensor:
    return draws_of(torch.arange(n), torch.zeros(n, dtype=torch.int64), n_steps)


def test_an_unknown_weight_returns_a_name_no_parameter_has(ours):
    params = {f"code_predictor.{name}": weight for name, weight in ours.named_parameters()}
    for name in ("code_predictor.model.layers.9.mlp.up_proj.weight", "code_predictor.extra"):
        assert load_predictor_weight(ours, params, name, torch.zeros(1)) not in params


@torch.no_grad()
def test_greedy_codes_equal_those_of_transformers(ours, upstream):
    past_hidden, first_embed = inputs(16)
    expected = upstream.generate(
        inputs_embeds=torch.stack((past_hidden, first_embed), dim=1),
        max_new_tokens=N_STEPS,
        do_sample=False,
    )
    codes, _ = ours(past_hidden, first_embed, None, None)
    assert codes.tolist() == expected.tolist()
    assert len(codes.unique()) > 20, "the case must not be trivial"


@torch.no_grad()
def test_the_sum_of_embeddings_is_that_of_transformers(ours, upstream):
    codes, embed_sum = ours(*inputs(5), None, None)
    tables = upstream.model.codec_embedding
    expected = sum(table(codes[:, step]) for step, table in enumerate(tables))
    torch.testing.assert_close(embed_sum, expected)
    torch.testing.assert_close(ours.embed_frames(codes), expected)


@torch.no_grad()
@pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "sampled"])
def test_a_batch_gives_the_same_codes_as_single_streams(ours, is_greedy):
    past_hidden, first_embed = inputs(9)
    draws = None if is_greedy else draws_for(9)
    greedy = None if is_greedy else torch.zeros(9, dtype=torch.bool)
    codes, embed_sum = ours(past_hidden, first_embed, greedy, draws)
    for n in range(9):
        one = slice(n, n + 1)
        alone, its_sum = ours(
            past_hidden[one],
            first_embed[one],
            None if greedy is None else greedy[one],
            None if draws is None else draws[one],
        )
        assert alone.tolist() == codes[one].tolist()
        torch.testing.assert_close(its_sum, embed_sum[one])


@torch.no_grad()
def test_greedy_and_sampled_streams_share_a_batch(ours):
    past_hidden, first_embed = inputs(8)
    greedy = torch.arange(8) % 2 == 0
    mixed, _ = ours(past_hidden, first_embed, greedy, draws_for(8))
    all_greedy, _ = ours(past_hidden, first_embed, None, None)
    all_sampled, _ = ours(past_hidden, first_embed, ~greedy & greedy, draws_for(8))
    assert mixed[greedy].tolist() == all_greedy[greedy].tolist()
    assert mixed[~greedy].tolist() == all_sampled[~greedy].tolist()
    assert mixed[~greedy].tolist() != all_greedy[~greedy].tolist()


@pytest.mark.parametrize("vocab", [20, 90, 2048])
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
def test_sampled_codes_never_leave_top_k_and_top_p(ours, vocab, spread):
    n = 400
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(3)) * spread
    codes = ours.sampler.choose(logits.expand(n, -1), 1.0, None, draws_for(n, 1)[:, 0])
    best = logits[0].argsort(descending=True)[:TOP_K]
    mass = logits[0, best].softmax(0)
    n_kept = int((mass.cumsum(0) - mass < TOP_P).sum())
    if spread:
        assert set(codes.tolist()) <= set(best[:n_kept].tolist())
    assert len(codes.unique()) <= n_kept


def test_sampled_codes_follow_the_truncated_probabilities(ours):
    n = 40_000
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])  # the nucleus is the first two
    codes = ours.sampler.choose(probabilities.log().expand(n, -1), 1.0, None, draws_for(n, 1)[:, 0])
    share = torch.bincount(codes, minlength=4) / n
    torch.testing.assert_close(share, torch.tensor([0.625, 0.375, 0.0, 0.0]), atol=0.01, rtol=0.0)


def test_a_code_is_drawn_again_though_the_candidates_change_ranks(ours):
    """As where KV was computed anew: the last bits of the logits differ."""
    n = 4_000
    logits = torch.randn(n, 2048, generator=torch.Generator().manual_seed(3)) * 0.3
    nearly = logits + torch.randn(n, 2048, generator=torch.Generator().manual_seed(4)) * 1e-5
    draw = draws_for(n, 1)[:, 0]
    ranks = [x.topk(TOP_K).indices for x in (logits, nearly)]
    assert (ranks[0] != ranks[1]).any(dim=1).float().mean() > 0.05, "the case must not be trivial"
    one, other = (ours.sampler.choose(x, 1.0, None, draw) for x in (logits, nearly))
    assert int((one != other).sum()) <= 1


@torch.no_grad()
@pytest.mark.parametrize("n", [1, 2, 7])
def test_a_traced_predictor_gives_the_same_codes_for_any_number_of_streams(ours, run, n):
    past_hidden, first_embed = inputs(n, seed=n)
    mixed = torch.arange(n) % 2 == 0
    for greedy, draws in ((None, None), (mixed, draws_for(n)), (mixed & ~mixed, draws_for(n))):
        codes, embed_sum = run(past_hidden, first_embed, greedy, draws)
        expected, its_sum = ours(past_hidden, first_embed, greedy, draws)
        assert codes.tolist() == expected.tolist()
        torch.testing.assert_close(embed_sum, its_sum)


@torch.no_grad()
def test_preparing_again_changes_nothing(ours):
    before, _ = ours(*inputs(5), None, None)
    ours.prepare()
    after, _ = ours(*inputs(5), None, None)
    assert after.tolist() == before.tolist()
