"""A fake session as the session cache treats it, from its first turn to its end."""

import torch
from sglang.srt.managers.cache_controller import HiCacheAck

from sglang_live.bridge.session.kv_record import LiveKvInfo
from sglang_live.bridge.tiers.host_copies import HostCopies
from sglang_live.kv.retention import Compaction
from test.unit.bridge.fake_host import ROW, FakeCache, FakeEvent


class Talk:
    """Its tokens, and a row of device slots.

    values: of its tokens, on the device or not. of_tree: device slots of its first tokens.
    """

    def __init__(self, cache: FakeCache, copies: HostCopies, name: str, index: int = 0):
        self.cache, self.copies, self.name, self.index = cache, copies, name, index
        self.page, self.row = cache.page_size, cache.req_to_token_pool.req_to_token[index]
        self._reset()

    def _reset(self) -> None:
        self.values: list[int] = []
        self.kv = LiveKvInfo(req_pool_idx=self.index)
        self.arrival: FakeEvent | None = None
        self.of_tree = torch.empty(0, dtype=torch.int64)

    def up(self, n_tokens: int) -> int:
        return -(-n_tokens // self.page) * self.page

    def on_device(self) -> list[int]:
        return self.cache.device_pool.values[self.row[: self.kv.kv_committed_len].long()].tolist()

    def on_host(self) -> list[int]:
        copy = self.copies.of(self.name)
        return self.cache.host_pool_group.values[copy.slots[: copy.end - copy.begin]].tolist()

    def turn(self, n_tokens: int, first: int = 1) -> None:
        """Computes what is missing, and something new."""
        self.arrive()
        begin = self.kv.kv_committed_len
        self.values += range(first, first + n_tokens)
        end = len(self.values)
        fresh = self.cache.device_pool.alloc(self.up(end) - self.up(begin))
        self._attach(self.up(begin), end, fresh)
        new = torch.tensor(self.values[begin:], dtype=torch.int64)
        self.cache.device_pool.values[self.row[begin:end].long()] = new

    def hand_to_tree(self, n_tokens: int) -> None:
        self.of_tree = self.row[:n_tokens].long()
        self.kv.cache_protected_len = n_tokens

    def arrive(self) -> None:
        if self.arrival is not None:
            self.arrival.wait()
            self.arrival = None

    def before_device_change(self) -> None:
        self.arrive()
        copy = self.copies.of(self.name)
        if copy is not None and copy.written is not None:
            copy.written.wait()

    def write(self) -> bool:
        return self.copies.write(self.name, self.kv)

    def evict(self, n_kept: int) -> None:
        self.arrive()
        self.write()
        self.before_device_change()
        self._free_from(n_kept)

    def _free_from(self, n_kept: int) -> None:
        end = self.up(self.kv.kv_allocated_len)
        if end > self.up(n_kept):
            self.cache.device_pool.free(self.row[self.up(n_kept) : end].long())
        self.kv.kv_allocated_len = min(self.kv.kv_allocated_len, n_kept)
        self.kv.kv_committed_len = self.kv.kv_allocated_len

    @property
    def n_on_host_alone(self) -> int:
        copy, begin = self.copies.of(self.name), self.kv.kv_committed_len
        if copy is None or begin % self.page or not copy.begin <= begin < copy.end:
            return 0
        return copy.end - begin

    def load(self, n_tokens: int) -> None:
        """With a prefill, which waits for it."""
        begin, end = self.kv.kv_committed_len, self.kv.kv_committed_len + n_tokens
        self._attach(begin, end, self.copies.load(self.copies.of(self.name), begin, end))
        self.cache.cache_controller.start_loading().wait()

    def preload(self) -> None:
        begin, copy = self.kv.kv_committed_len, self.copies.of(self.name)
        device = self.cache.device_pool.alloc(self.up(copy.end) - begin)
        self.arrival = self.copies.preload(copy, begin, copy.end, device)
        self._attach(begin, copy.end, device)

    def _attach(self, begin: int, end: int, device: torch.Tensor) -> None:
        self.row[begin : begin + len(device)] = device.to(torch.int32)
        self.kv.kv_committed_len = self.kv.kv_allocated_len = end

    def truncate(self, n_kept: int) -> None:
        self.before_device_change()
        self.copies.truncate(self.name, n_kept)
        self._free_from(n_kept)
        del self.values[n_kept:]

    def compact(self, compaction: Compaction) -> None:
        own_from = max(self.kv.cache_protected_len, compaction.begin)
        self.kv.cache_protected_len = min(self.kv.cache_protected_len, compaction.begin)
        self.before_device_change()
        self.copies.compact(self.name, compaction)
        self.cache.device_pool.free(self.row[own_from : compaction.end].long())
        end = self.up(self.kv.kv_allocated_len)
        self.row[compaction.begin : compaction.begin + end - compaction.end] = self.row[
            compaction.end : end
        ].clone()
        self.kv.kv_committed_len -= compaction.n_tokens
        self.kv.kv_allocated_len -= compaction.n_tokens
        del self.values[compaction.begin : compaction.end]

    def close(self) -> None:
        self.before_device_change()
        self.copies.forget(self.name)
        own = self.row[self.kv.cache_protected_len : self.up(self.kv.kv_allocated_len)].long()
        self.cache.device_pool.free(torch.cat([self.of_tree, own]))
        self._reset()


def end(cache: FakeCache, ack: HiCacheAck) -> None:
    ack.finish_event.synchronize()
    for transfer in ack.node_ids:
        del cache.host_pool_group.in_transfer[transfer]


def acknowledge(cache: FakeCache, copies: HostCopies, most: int = ROW) -> None:
    """The oldest of each queue, as LiveRadixCache does."""
    controller = cache.cache_controller
    for queue, link in (
        (controller.ack_write_queue, copies.to_tier),
        (controller.ack_load_queue, copies.to_device),
    ):
        for ack in queue[:most]:
            end(cache, ack)
            copies.measure(ack, link)
            assert all(copies.acknowledged(transfer) for transfer in ack.node_ids)
        del queue[:most]
