from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from sglang_live.bridge.platform.host_pool import unregister

ALREADY_REGISTERED, NOT_REGISTERED = 712, 713


class FakeCudaRuntime:
    """CUDA's register of host memory: addresses, freed or not."""

    def __init__(self):
        self.registered = {}

    def cudaHostRegister(self, address, size, flags):
        if address in self.registered:
            return ALREADY_REGISTERED
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address):
        return 0 if self.registered.pop(address, None) else NOT_REGISTERED

    def cudaGetErrorString(self, code):
        return str(code)


@pytest.fixture
def cuda(monkeypatch):
    runtime = FakeCudaRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


def host_pool():
    shape = dict(dtype=torch.bfloat16, head_num=1, head_dim=4, layer_num=2)
    pool = MHATokenToKVPool(size=32, page_size=4, device="cpu", enable_memory_saver=False, **shape)
    info = pool.get_device_pool_infos()[0].buffer_info
    return MHATokenToKVPoolHost(
        info,
        2.0,
        0,
        4,
        "layer_first",
        pin_memory=True,
        device_capacity_tokens=pool.size,
        start_layer=0,
        end_layer=2,
    )


def test_released_memory_is_no_longer_registered(cuda):
    pool = host_pool()
    assert sum(cuda.registered.values()) == pool.size * pool.size_per_token
    unregister(pool)
    pool.destroy()
    assert cuda.registered == {}


def test_a_pool_released_twice_is_unregistered_once(cuda):
    pool = host_pool()
    for _ in range(2):
        unregister(pool)
        pool.destroy()
    assert cuda.registered == {}


@pytest.mark.parametrize("buffers", [None, torch.zeros(4), [torch.zeros(4), None]])
def test_memory_that_is_not_registered_is_left_alone(cuda, buffers):
    unregister(SimpleNamespace(kv_buffer=buffers))
    assert cuda.registered == {}
