"""Which KV pools allow that keys are rotated in place."""

from types import SimpleNamespace

import pytest
from torch import nn

from sglang_live.bridge.session.compact import Rebase


class FakeModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.rope = nn.Module()
        self.rope.cos_sin_cache, self.rope.base = None, 1e6


@pytest.mark.parametrize("scales", ["k_scale_buffer", "native_k_scale_buffer"])
def test_keys_with_a_scale_per_block_cannot_be_rotated(scales):
    pool = SimpleNamespace(**{"k_scale_buffer": None, scales: [object()]})
    with pytest.raises(ValueError, match=r"FP4 or MXFP8 .* set kv_cache_dtype to fp8_e4m3"):
        Rebase(FakeModel(), pool, 32768, has_table=True)


def test_keys_without_scales_can_be_rotated():
    Rebase(FakeModel(), SimpleNamespace(k_scale_buffer=None), 32768, has_table=True)
