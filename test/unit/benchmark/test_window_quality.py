"""Claims about sessions that are bounded without an engine, and about their scores."""

import numpy as np
import pytest
import torch

from benchmark.window_quality.held import Arm, HeldSessions
from benchmark.window_quality.scores import perplexity, perplexity_ratio, share

N, SINK, WINDOW = 40, 4, 16


@pytest.fixture(scope="module")
def one_layer():
    """Its keys and values depend on their own tokens only, so dropped ones leave no trace."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    return LlamaForCausalLM(config).eval()


def sessions(model, how: str) -> HeldSessions:
    arm = Arm(name=how, how=how, sink_tokens=SINK, window_tokens=WINDOW)
    return HeldSessions(model, arm)


def ids(n: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 50, (2, n), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("how", ["window", "again"])
def test_a_compacted_session_is_the_shorter_conversation(one_layer, how):
    held, said, after = sessions(one_layer, how), ids(N, 1), ids(5, 2)
    held.append(said)
    held.end_turn()
    assert held.n_tokens == SINK + WINDOW
    kept = torch.cat([said[:, :SINK], said[:, -WINDOW:], after], dim=1)
    expected = one_layer(kept).logits[:, -5:]
    torch.testing.assert_close(held.append(after), expected, atol=1e-5, rtol=1e-4)


def test_only_a_recomputed_session_computes_tokens_twice(one_layer):
    computed = {}
    for how in ("all", "window", "again"):
        held = sessions(one_layer, how)
        held.append(ids(N, 1))
        held.end_turn()
        computed[how] = held.n_computed
    assert computed == {"all": 2 * N, "window": 2 * N, "again": 2 * (N + SINK + WINDOW)}


def test_a_branch_leaves_the_session_as_it_was(one_layer):
    held, question = sessions(one_layer, "all"), ids(5, 3)
    held.append(ids(N, 1))
    first = held.branch().append(question)
    torch.testing.assert_close(held.branch().append(question), first)
    assert held.n_tokens == N


def test_perplexity_is_the_exponential_of_the_mean():
    nll = np.full((2, 256), np.log(7.0))
    found = perplexity(nll, seed=1)
    assert (found.low, found.value, found.high) == pytest.approx((7, 7, 7))


def test_a_ratio_is_paired_so_hard_blocks_cancel():
    rng = np.random.default_rng(1)
    full = np.repeat(rng.uniform(0, 6, (4, 8)), 128, axis=1)
    found = perplexity_ratio(full + np.log(1.5), full, seed=1)
    assert (found.low, found.high) == pytest.approx((1.5, 1.5))


def test_answers_of_one_dialogue_are_drawn_together():
    right = [True] * 10 + [False] * 10
    apart = share(right, list(range(20)), seed=1)
    together = share(right, [0] * 10 + [1] * 10, seed=1)
    assert apart.value == together.value == 0.5
    assert (together.low, together.high) == (0, 1)
    assert apart.low > 0.2
