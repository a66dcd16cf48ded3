import pytest
import torch

from sglang_live.bridge.platform.cpu_attention import own_rows


@pytest.fixture(scope="module")
def upstream():
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    found = TorchNativeAttnBackend._run_sdpa_forward_extend
    return getattr(found, "__wrapped__", found)


def batch(lengths: list[tuple[int, int]], n_heads: int, n_kv_heads: int, seed: int) -> dict:
    """lengths: of each request, behind which prefix how many tokens are new."""
    generator = torch.Generator().manual_seed(seed)
    totals = [prefix + n for prefix, n in lengths]
    n_slots, n_new = 2 * sum(totals), sum(n for _, n in lengths)
    table = torch.zeros(len(lengths) + 3, max(totals), dtype=torch.int32)
    slots = torch.randperm(n_slots, generator=generator).to(torch.int32)
    for row, (total, at) in enumerate(zip(totals, range(len(totals)), strict=True)):
        table[row + 1, :total] = slots[sum(totals[:at]) : sum(totals[:at]) + total]
    return {
        "query": torch.randn(n_new, n_heads, 16, generator=generator),
        "output": torch.full((n_new, n_heads, 16), float("nan")),
        "k_cache": torch.randn(n_slots, n_kv_heads, 16, generator=generator),
        "v_cache": torch.randn(n_slots, n_kv_heads, 16, generator=generator),
        "req_to_token": table,
        "req_pool_indices": torch.arange(1, len(lengths) + 1),
        "seq_lens": torch.tensor(totals),
        "extend_prefix_lens": torch.tensor([prefix for prefix, _ in lengths]),
        "extend_seq_lens": torch.tensor([n for _, n in lengths]),
        "scaling": 0.25,
        "enable_gqa": n_heads != n_kv_heads,
        "causal": True,
    }


@pytest.mark.parametrize("heads", [(4, 2), (4, 4)])
@pytest.mark.parametrize(
    "lengths",
    [[(0, 1)], [(7, 1)], [(0, 40)], [(300, 37)], [(128, 64), (0, 5), (513, 2)], [(900, 512)]],
    ids=str,
)
def test_the_attention_of_a_chunk_equals_upstreams(upstream, lengths, heads):
    call = batch(lengths, *heads, seed=1)
    expected = upstream(None, **{**call, "output": call["output"].clone()})
    got = own_rows(upstream, None, **call)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)


def test_other_than_plain_causal_attention_is_upstreams():
    call = batch([(10, 4)], 4, 2, seed=2)
    asked = []
    for other in ({"causal": False}, {"sliding_window_size": 8}, {"is_cross_attn": True}):
        own_rows(lambda *args: asked.append(args), None, **(call | other))
    assert len(asked) == 3
