"""Which models and KV pools allow that keys are rotated in place."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from torch import nn

from sglang_live.bridge.session.compact import Rebase

POOL = SimpleNamespace(k_scale_buffer=None)


class FakeRope(nn.Module):
    """scale: of the frequencies in the table, which the embedding's own function does not know."""

    def __init__(self, scale: float = 1.0, dtype: torch.dtype = torch.float32, base: float = 1e6):
        super().__init__()
        self.base = base
        angles = torch.outer(torch.arange(4.0), self._compute_inv_freq(base) * scale)
        self.cos_sin_cache = torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)

    def _compute_inv_freq(self, base: float) -> torch.Tensor:
        return 1.0 / base ** (torch.arange(0, 64, 2).float() / 64)


class FakeLayer(nn.Module):
    def __init__(self, rope: FakeRope):
        super().__init__()
        self.rotary_emb, self.attn = rope, RadixAttention(1, 64, 1.0, 1, layer_id=0)


class FakeModel(nn.Module):
    """Its encoder of images has an embedding of its own."""

    def __init__(self, *ropes: FakeRope):
        super().__init__()
        self.visual = FakeRope(base=5e3)
        self.layers = nn.ModuleList(map(FakeLayer, ropes or [FakeRope()]))


@pytest.mark.parametrize("scales", ["k_scale_buffer", "native_k_scale_buffer"])
def test_keys_with_a_scale_per_block_cannot_be_rotated(scales):
    pool = SimpleNamespace(**{"k_scale_buffer": None, scales: [object()]})
    with pytest.raises(ValueError, match=r"FP4 or MXFP8 .* set kv_cache_dtype to fp8_e4m3"):
        Rebase(FakeModel(), pool, 32768, has_table=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_of_a_plain_embedding_can_be_rotated(dtype):
    Rebase(FakeModel(FakeRope(dtype=dtype), FakeRope(dtype=dtype)), POOL, 32768, has_table=False)


def test_keys_are_rotated_by_the_embedding_of_the_layers_with_kv():
    rebase = Rebase(FakeModel(FakeRope(base=1e6)), POOL, 32768, has_table=True)
    assert rebase._rope.base == 1e6


@pytest.mark.parametrize(
    "ropes",
    [(FakeRope(0.25),), (FakeRope(), FakeRope(base=1e4))],
    ids=["scaled", "two of different bases"],
)
def test_keys_of_other_embeddings_cannot(ropes):
    with pytest.raises(ValueError, match="leave out the policy retention"):
        Rebase(FakeModel(*ropes), POOL, 32768, has_table=False)
