"""Claims about KV buffers that other processes can map."""

import mmap
import os
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from sglang_live.extensions.lending.engine.shared_buffers import (  # noqa: E402
    create_shared_buffers,
    shared_buffers,
)

CPU = torch.device("cpu")


def test_another_mapping_of_the_file_has_the_buffers_bytes():
    memory, (k, v) = shared_buffers([(10, 2, 4), (10, 2, 8)], torch.float32, CPU)
    assert not k.any() and not v.any()
    k[3], v[9] = 1.5, -2.0
    other = torch.frombuffer(mmap.mmap(memory.shared.fd, memory.shared.n_bytes), dtype=torch.uint8)
    for buffer, offset, row in zip((k, v), memory.offsets, memory.row_bytes, strict=True):
        seen = other[offset : offset + 10 * row].view(torch.float32).view(buffer.shape)
        assert torch.equal(seen, buffer)
    os.close(memory.shared.fd)


def test_buffers_begin_at_pages_and_do_not_overlap():
    memory, _ = shared_buffers([(100, 3, 5)] * 4, torch.bfloat16, CPU)
    assert all(offset % mmap.PAGESIZE == 0 for offset in memory.offsets)
    ends = [offset + 100 * 30 for offset in memory.offsets]
    assert all(end <= begin for end, begin in zip(ends, memory.offsets[1:], strict=False))
    assert ends[-1] <= memory.shared.n_bytes
    os.close(memory.shared.fd)


class FakePool(SimpleNamespace):
    """A pool of two layers."""

    def _kv_buffer_shapes(self):
        return (8, 1, 4), (8, 1, 4)


def test_sglang_allocates_buffers_of_another_layout():
    pool = FakePool(kv_cache_layout="hnd", layer_num=2, store_dtype=torch.float32, device="cpu")
    called = []
    create_shared_buffers(called.append, pool)
    assert called == [pool] and not hasattr(pool, "k_buffer")


def test_a_shared_pool_has_a_buffer_per_layer():
    pool = FakePool(kv_cache_layout="nhd", layer_num=2, store_dtype=torch.float32, device="cpu")
    create_shared_buffers(lambda _: pytest.fail("SGLang allocates"), pool)
    assert [buffer.shape for buffer in (*pool.k_buffer, *pool.v_buffer)] == [(8, 1, 4)] * 4
    assert len(pool.kv_memory.offsets) == 4
    os.close(pool.kv_memory.shared.fd)
