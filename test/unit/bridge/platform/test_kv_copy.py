import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.bridge.platform.kv_copy import contiguous_runs, copy_rows

slots = st.lists(st.integers(0, 40), max_size=30, unique=True)


@given(slots, st.randoms())
def test_runs_cover_the_pairs_in_order(src, random):
    dst = random.sample(range(60), len(src))
    pairs = [(from_ + i, to + i) for from_, to, n in contiguous_runs(src, dst) for i in range(n)]
    assert pairs == list(zip(src, dst, strict=True))


def test_a_contiguous_page_is_one_run():
    assert contiguous_runs([8, 9, 10, 11, 4, 5], [0, 1, 2, 3, 4, 5]) == [(8, 0, 4), (4, 4, 2)]


def test_rows_of_every_layer_are_copied():
    src = [torch.randn(10, 2, 3) for _ in range(3)]
    dst = [torch.zeros(12, 2, 3) for _ in range(3)]
    from_, to = torch.tensor([1, 2, 7]), torch.tensor([11, 3, 4])
    copy_rows(src, dst, from_, to, page_size=1)
    for old, new in zip(src, dst, strict=True):
        assert torch.equal(new[to], old[from_])
        assert new.count_nonzero(dim=0).max() == 3
