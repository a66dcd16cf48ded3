"""Fakes of SGLang's two tiers, as HostCopies uses them; transfers end as late as possible."""

from types import SimpleNamespace

import torch
from sglang.srt.managers.cache_controller import CacheOperation, HiCacheAck
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

BYTES_PER_TOKEN = 1 << 18
TRANSFER_S = 0.25
ROW = 64
FREED = -1


class FakePool:
    """Slots of whole pages, and what they hold; what is freed is overwritten at once."""

    size_per_token = BYTES_PER_TOKEN

    def __init__(self, n_slots: int, page: int):
        self.page, self.n_slots, self.size = page, n_slots, n_slots
        self.values = torch.full((n_slots + page,), FREED)
        self._free_pages = list(range(1, n_slots // page + 1))
        self.in_transfer: dict[int, set[int]] = {}  # slots, until SGLang has acknowledged

    def available_size(self) -> int:
        return len(self._free_pages) * self.page

    def alloc(self, n_slots: int) -> torch.Tensor | None:
        assert n_slots % self.page == 0
        if n_slots > self.available_size():
            return None
        pages = [self._free_pages.pop() for _ in range(n_slots // self.page)]
        slots = [page * self.page + i for page in pages for i in range(self.page)]
        return torch.tensor(slots, dtype=torch.int64)

    def free(self, slots: torch.Tensor) -> None:
        pages = sorted({slot // self.page for slot in slots.tolist()})
        assert len(pages) * self.page == len(slots), "pages are freed as a whole"
        assert not set(pages) & set(self._free_pages), "freed twice"
        for busy in self.in_transfer.values():
            assert not busy & set(slots.tolist()), "freed while busy"
        self.values[slots] = FREED
        self._free_pages += pages

    # The storage interface of SGLang's pools in host memory.

    def get_data_page(self, slot: int, flat: bool) -> torch.Tensor:
        return self.values[slot : slot + self.page].clone()

    def set_from_flat_data_page(self, slot: int, page: torch.Tensor) -> None:
        self.values[slot : slot + self.page] = page


class FakeStream:
    """Runs its work in order, when a reader waits for it."""

    def __init__(self):
        self._work: list[tuple[FakeEvent, object]] = []

    def submit(self, work) -> "FakeEvent":
        event = FakeEvent(self)
        self._work.append((event, work))
        return event

    def wait_event(self, event: "FakeEvent") -> None:
        self.submit(event.synchronize)

    def wait_stream(self, other: "FakeStream") -> None:
        self.wait_event(other.submit(lambda: None))

    def run_to(self, event: "FakeEvent") -> None:
        while not event.is_over:
            done, work = self._work.pop(0)
            work()
            done.is_over = True


class FakeEvent:
    def __init__(self, stream: FakeStream):
        self._stream, self.is_over = stream, False

    def synchronize(self) -> None:
        self._stream.run_to(self)

    def wait(self, stream=None) -> None:
        self.synchronize()

    def elapsed_time(self, end: "FakeEvent") -> float:
        return 1000 * TRANSFER_S


class FakeEngine:
    """Its transfers are pairs of slots, on the host and on the device."""

    def __init__(self, host: FakePool, device: FakePool):
        self._host, self._device = host, device
        self.device_to_host_stream, self.host_to_device_stream = FakeStream(), FakeStream()

    def submit_device_to_host(self, host: torch.Tensor, device: torch.Tensor) -> FakeEvent:
        def copy() -> None:
            self._host.values[host] = self._device.values[device]

        return self.device_to_host_stream.submit(copy)

    def submit_host_to_device(self, transfer, transfer_layer_id_max):
        host, device = transfer

        def copy() -> None:
            self._device.values[device] = self._host.values[host]

        done = self.host_to_device_stream.submit(copy)
        return SimpleNamespace(start_event=done, finish_event=done, timing_enabled=True)


class FakeController:
    """SGLang's HybridCacheController.

    load_fence_stream: of forward passes, which its own writes wait for as well.
    """

    transfer_layer_id_max = 1

    def __init__(self, host: FakePool, device: FakePool):
        self._host, self._device = host, device
        self.load_fence_stream = FakeStream()
        self.mem_pool_host = SimpleNamespace(anchor_entry=SimpleNamespace(host_pool=host))
        self.l2_transfer_engine = FakeEngine(host, device)
        self.write_queue: list[CacheOperation] = []
        self.load_queue: list[CacheOperation] = []
        self.ack_write_queue: list[HiCacheAck] = []
        self.ack_load_queue: list[HiCacheAck] = []

    @staticmethod
    def _completion(done: FakeEvent) -> SimpleNamespace:
        return SimpleNamespace(start_event=done, finish_event=done, timing_enabled=True)

    def start_writing(self) -> None:
        operation = CacheOperation.merge_ops(self.write_queue)
        self.write_queue.clear()
        host, device = self._move_op_indices(operation)
        self.l2_transfer_engine.device_to_host_stream.wait_stream(self.load_fence_stream)
        done = self.l2_transfer_engine.submit_device_to_host(host, device)
        self.ack_write_queue.append(self._ack(operation, done))

    def load(self, host_indices: torch.Tensor, node_id: int) -> torch.Tensor | None:
        device = self._device.alloc(len(host_indices))
        if device is not None:
            self.load_queue.append(CacheOperation(host_indices, device, node_id))
            self._move_op_indices(self.load_queue[-1])
        return device

    def start_loading(self) -> FakeEvent:
        operation = CacheOperation.merge_ops(self.load_queue)
        self.load_queue.clear()
        transfer = self._move_op_indices(operation)
        done = self.l2_transfer_engine.submit_host_to_device(transfer, 1).finish_event
        self.ack_load_queue.append(self._ack(operation, done))
        return done

    def _ack(self, operation: CacheOperation, done: FakeEvent) -> HiCacheAck:
        n_bytes = self._transfer_num_bytes(operation)
        return HiCacheAck(done, done, operation.node_ids, timing_enabled=True, num_bytes=n_bytes)

    def _move_op_indices(self, operation: CacheOperation) -> tuple[torch.Tensor, torch.Tensor]:
        for transfer in operation.node_ids:
            self._host.in_transfer[transfer] = set(operation.host_indices.tolist())
        return operation.host_indices, operation.device_indices

    def _l2_load_transfers(self, host, device):
        return host, device

    def _transfer_num_bytes(self, operation: CacheOperation) -> int:
        return len(operation.device_indices) * BYTES_PER_TOKEN

    def _num_tokens_by_pool(self, operation: CacheOperation) -> dict[str, int]:
        return {"kv": len(operation.device_indices)}


class FakeCache:
    """of_tree: host slots that the radix tree can evict."""

    _pad_retraction_indices = staticmethod(UnifiedRadixCache._pad_retraction_indices)

    def __init__(self, page: int, host_tokens: int):
        self.page_size = page
        self.device_pool = FakePool(4 * ROW, page)
        self.host_pool_group = FakePool(host_tokens, page)
        self.cache_controller = FakeController(self.host_pool_group, self.device_pool)
        rows = torch.zeros((2, ROW), dtype=torch.int32)
        self.req_to_token_pool = SimpleNamespace(req_to_token=rows)
        self.of_tree = torch.empty(0, dtype=torch.int64)

    def evict_host(self, n_slots: int) -> None:
        n_slots = min(len(self.of_tree), -(-n_slots // self.page_size) * self.page_size)
        self.host_pool_group.free(self.of_tree[:n_slots])
        self.of_tree = self.of_tree[n_slots:]
