"""torch.cuda of the fake device."""

import contextlib
import itertools
import threading
import time
from types import SimpleNamespace

import torch
from fake_cuda_graph import FakeCapture, FakeGraph, is_capturing

TOTAL_BYTES = 8 << 30
PROPERTIES = SimpleNamespace(
    name="Fake H100",
    major=9,
    minor=0,
    total_memory=TOTAL_BYTES,
    multi_processor_count=132,
    is_integrated=False,
    uuid="GPU-fake",
    warp_size=32,
    L2_cache_size=50 << 20,
)
_handles = itertools.count(1)
_streams = threading.local()


class FakeStream:
    def __init__(self, device=None, priority=0):
        self.device = torch.device("cuda", 0)
        self.cuda_stream = self.stream_id = next(_handles)

    def wait_stream(self, stream): ...

    def wait_event(self, event): ...

    def record_event(self, event=None):
        event = event or FakeEvent()
        event.record(self)
        return event

    def synchronize(self):
        _refuse_while_capturing()

    def query(self):
        return True


class FakeEvent:
    def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
        self._at_s = 0.0

    def record(self, stream=None):
        self._at_s = time.perf_counter()

    def wait(self, stream=None): ...

    def query(self):
        return True

    def synchronize(self):
        _refuse_while_capturing()

    def elapsed_time(self, other):
        return 1e3 * (other._at_s - self._at_s)


class FakeStreamContext(contextlib.AbstractContextManager):
    def __init__(self, stream):
        self._stream = stream

    def __enter__(self):
        _entered().append(self._stream or current_stream())

    def __exit__(self, *_):
        _entered().pop()


class FakeRuntime:
    """cudart(): memory of the host is registered by saying so."""

    def __getattr__(self, name):
        return lambda *args: 0


def current_stream(device=None):
    return _entered()[-1] if _entered() else _DEFAULT


def _entered() -> list:
    if not hasattr(_streams, "entered"):
        _streams.entered = []
    return _streams.entered


def _refuse_while_capturing() -> None:
    if is_capturing():
        raise RuntimeError("fake CUDA: a wait is not permitted when the stream is capturing")


_DEFAULT = FakeStream()


def _nothing():
    """A function of its own for each name: torch._dynamo keeps a table of them."""
    return lambda *args, **kwargs: None


def replace_cuda() -> None:
    replaced = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        "get_device_name": lambda device=None: PROPERTIES.name,
        "get_arch_list": lambda: ["sm_90"],
        "mem_get_info": lambda device=None: (TOTAL_BYTES // 2, TOTAL_BYTES),
        "memory_stats": lambda device=None: {},
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": is_capturing,
        "is_initialized": lambda: True,
        "graph_pool_handle": lambda: (0, 1),
        "cudart": FakeRuntime,
        "Stream": FakeStream,
        "Event": FakeEvent,
        "StreamContext": FakeStreamContext,
        "stream": FakeStreamContext,
        "current_stream": current_stream,
        "default_stream": lambda device=None: _DEFAULT,
        "CUDAGraph": FakeGraph,
        "graph": FakeCapture,
        "device": lambda index: contextlib.nullcontext(),
        "synchronize": lambda device=None: _refuse_while_capturing(),
    }
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        replaced[name] = lambda device=None: 0
    for name in (
        *("set_device", "set_stream", "init", "_lazy_init", "empty_cache", "ipc_collect"),
        *("manual_seed", "manual_seed_all", "reset_peak_memory_stats", "set_sync_debug_mode"),
    ):
        replaced[name] = _nothing()
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch.version.cuda = "13.0"
    torch.Tensor.record_stream = _nothing()
    for name in ("init_process_group", "new_group"):
        setattr(torch.distributed, name, _over_gloo(getattr(torch.distributed, name)))


def _over_gloo(make_group):
    def make(*args, **kwargs):
        args = tuple("gloo" if value == "nccl" else value for value in args)
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "gloo"
        kwargs.pop("device_id", None)
        return make_group(*args, **kwargs)

    return make
