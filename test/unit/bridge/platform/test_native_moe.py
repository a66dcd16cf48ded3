from types import SimpleNamespace

import pytest
import torch

from sglang_live.bridge.platform import native_moe
from sglang_live.bridge.platform.native_moe import forward, run_experts


def inputs(n_tokens: int, dtype: torch.dtype, n_experts: int = 6, hidden: int = 16):
    noise = torch.Generator().manual_seed(n_tokens)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=noise) / shape[-1] ** 0.5).to(dtype)

    weights, ids = torch.rand(n_tokens, n_experts, generator=noise).topk(2)
    return (
        random(n_tokens, hidden) * 4,
        weights,
        ids,
        random(n_experts, 48, hidden),
        random(n_experts, hidden, 24),
    )


def one_by_one(x, weights, ids, w13, w2):
    """The definition, in float64."""
    x, weights, w13, w2 = (tensor.double() for tensor in (x, weights, w13, w2))
    out = torch.zeros_like(x)
    for token, (row, experts) in enumerate(zip(x, ids.tolist(), strict=True)):
        for slot, expert in enumerate(experts):
            gate, up = (w13[expert] @ row).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
            out[token] += weights[token, slot] * (w2[expert] @ hidden)
    return out


@pytest.mark.parametrize("n_tokens", [1, 3, 17, 200])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("gathered_bytes", [0, native_moe.MAX_GATHERED_BYTES])
def test_experts_compute_what_they_are_defined_to(
    monkeypatch, n_tokens, dtype, tolerance, gathered_bytes
):
    monkeypatch.setattr(native_moe, "MAX_GATHERED_BYTES", gathered_bytes)
    args = inputs(n_tokens, dtype)
    out = run_experts(*args)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), one_by_one(*args), rtol=tolerance, atol=tolerance)


def test_rows_of_padding_do_not_change_the_others():
    x, weights, ids, w13, w2 = inputs(5, torch.float32)
    expected = run_experts(x[:3], weights[:3], ids[:3], w13, w2)
    ids[3:] = -1
    assert torch.equal(run_experts(x, weights, ids, w13, w2)[:3], expected)


@pytest.mark.parametrize(
    "changed",
    [{"activation": "gelu"}, {"apply_router_weight_on_input": True}, {"gemm1_alpha": 1.7}],
)
def test_experts_of_another_form_are_refused(changed):
    config = {
        "activation": "silu",
        "apply_router_weight_on_input": False,
        "gemm1_alpha": None,
        "gemm1_clamp_limit": None,
    }
    method = SimpleNamespace(moe_runner_config=SimpleNamespace(**(config | changed)))
    with pytest.raises(ValueError, match="SwiGLU"):
        forward(method, SimpleNamespace(), None)
