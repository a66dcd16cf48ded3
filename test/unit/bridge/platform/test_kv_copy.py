import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.bridge.platform.kv_copy import _copy_runs, contiguous_runs, copy_rows

ROOT = Path(__file__).parents[4]
sys.path.insert(0, str(ROOT / "test" / "fake_cuda"))
from fake_cuda import ENVIRONMENT  # noqa: E402

slots = st.lists(st.integers(0, 40), max_size=30, unique=True)


@given(slots, st.randoms())
def test_runs_cover_the_pairs_in_order(src, random):
    dst = random.sample(range(60), len(src))
    pairs = [(from_ + i, to + i) for from_, to, n in contiguous_runs(src, dst) for i in range(n)]
    assert pairs == list(zip(src, dst, strict=True))


def test_a_contiguous_page_is_one_run():
    assert contiguous_runs([8, 9, 10, 11, 4, 5], [0, 1, 2, 3, 4, 5]) == [(8, 0, 4), (4, 4, 2)]


@pytest.mark.parametrize("copy", [copy_rows, lambda *args, page_size: _copy_runs(*args)])
def test_rows_of_every_layer_are_copied(copy):
    src = [torch.randn(10, 2, 3) for _ in range(3)]
    dst = [torch.zeros(12, 2, 3) for _ in range(3)]
    from_, to = torch.tensor([1, 2, 7]), torch.tensor([11, 3, 4])
    copy(src, dst, from_, to, page_size=1)
    for old, new in zip(src, dst, strict=True):
        assert torch.equal(new[to], old[from_])
        assert new.count_nonzero(dim=0).max() == 3


def test_no_rows_are_no_copy():
    layer, none = torch.randn(10, 2, 3), torch.zeros(0, dtype=torch.int64)
    kept = layer.clone()
    copy_rows([layer], [layer], none, none, page_size=1)
    assert torch.equal(layer, kept)


def test_a_device_and_pinned_memory_exchange_rows_by_the_kernel():
    pytest.importorskip("triton")
    result = subprocess.run(
        [sys.executable, "-m", "test.unit.bridge.platform.kv_copy_on_fake_cuda"],
        env={**os.environ, **ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "copied\n"
