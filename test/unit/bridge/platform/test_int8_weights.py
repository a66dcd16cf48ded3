"""Weights in 8 bits: close to the float ones, and the same for a token in any batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.bridge.platform.int8_weights import Int8Weight


def weight(n_out: int, n_in: int) -> torch.Tensor:
    return torch.randn(n_out, n_in, generator=torch.Generator().manual_seed(7)) / n_in**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_close_to_those_of_the_float_weight(dtype):
    w = weight(192, 64)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.arange(192.0)
    out = Int8Weight(w).apply(None, x, bias)
    expected = x.float() @ w.T + bias
    assert out.dtype == dtype and out.shape == (5, 192)
    assert (out.float() - expected).norm() < 0.02 * (x.float() @ w.T).norm() + (
        0.01 * expected.norm() if dtype == torch.bfloat16 else 0
    )


@given(
    seed=st.integers(0, 1 << 20),
    n=st.integers(1, 33),
    loud=st.sampled_from((1e-30, 0.01, 1.0, 1e4)),
)
def test_a_tokens_result_does_not_depend_on_the_others(seed, n, loud):
    layer = Int8Weight(weight(48, 32))
    x = torch.randn(n, 32, generator=torch.Generator().manual_seed(seed))
    others = torch.randn(3, 32, generator=torch.Generator().manual_seed(seed + 1)) * loud
    together = layer.apply(None, torch.cat([others, x]))
    assert torch.equal(together[3:], layer.apply(None, x))


def test_zeros_give_zeros_and_shapes_are_kept():
    layer = Int8Weight(weight(8, 16))
    assert torch.equal(layer.apply(None, torch.zeros(2, 3, 16)), torch.zeros(2, 3, 8))
    assert layer.apply(None, torch.zeros(0, 16)).shape == (0, 8)


def test_a_weight_of_zeros_gives_zeros():
    assert torch.equal(
        Int8Weight(torch.zeros(4, 6)).apply(None, torch.ones(1, 6)), torch.zeros(1, 4)
    )
