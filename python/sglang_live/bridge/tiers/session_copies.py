"""Copies of sessions' KV on a tier below the device, through SGLang's HiCache.

A copy begins behind the session's prefix in the radix tree, is extended by new tokens only, and is
kept until the session's KV changes. A turn then transfers its own tokens, and eviction on the
device frees what has a copy. Transfers run on HiCache's streams and end through its queues of
acknowledgements, which all ranks drain alike.
Subclasses: the tiers, which differ in their memory: host_copies.py, and those of extensions.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.managers.cache_controller import CacheOperation, HiCacheAck, device_module
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.utils.common import ceil_align

from sglang_live.bridge.round_facts import LinkRate
from sglang_live.bridge.session.kv_record import LiveKvInfo
from sglang_live.kv.link import Link, LinkConfig
from sglang_live.kv.retention import Compaction

# Without a device a copy has a negligible launch cost.
_WITHIN_ONE_MEMORY = LinkConfig(min_bytes=1 << 14)


@dataclass(slots=True, eq=False)
class SessionCopy:
    """A session's tokens [begin, end); begin is the start of a page.

    Attributes:
        slots: int64 [whole pages], the tier's slots of the tokens from begin on.
        busy: transfers from or to these slots that SGLang has not acknowledged.
        written: event of the latest write; None once it is acknowledged.
        gone: whether the copy was dropped; its memory is freed when it is not busy.
    """

    begin: int
    end: int
    slots: torch.Tensor
    busy: set[int] = field(default_factory=set)
    written: Any = None
    gone: bool = False

    @staticmethod
    def empty(at: int) -> "SessionCopy":
        """No tokens, in the place of a copy that begins there."""
        return SessionCopy(at, at, torch.empty(0, dtype=torch.int64))

    def wait_until_written(self) -> bool:
        """Order all later launches after its latest write. Returns whether one is going on."""
        if self.written is None:
            return False
        wait_for(self.written)
        return True


class SessionCopies(ABC):
    """
    Attributes:
        to_tier: the measured link from the device.
        to_device: the measured link to the device.
        counts: since the start.
    """

    def __init__(self, cache: UnifiedRadixCache, numbers: Iterator[int], counts: tuple[str, ...]):
        """
        Args:
            numbers: of transfers, common to the tiers of a session cache.
            counts: further names.
        """
        self._cache = cache
        self._numbers = numbers
        config = LinkConfig() if device_module is torch.cuda else _WITHIN_ONE_MEMORY
        self.to_tier = Link(config)
        self.to_device = Link(config)
        names = ("tokens_written", "tokens_loaded", "tokens_preloaded", "reload_s")
        self.counts = dict.fromkeys((*names, *counts), 0.0)
        self.reset()

    def reset(self) -> None:
        """To be called when SGLang has emptied its pools."""
        self._copies: dict[str, SessionCopy] = {}
        self._writes: dict[int, SessionCopy] = {}
        self._loads: dict[int, SessionCopy] = {}
        self._loading_tokens: dict[int, int] = {}
        self._on_path: set[int] = set()  # loads that a prefill waits for

    # --- the tier's memory ---

    @abstractmethod
    def take_slots(self, session_id: str, n: int) -> torch.Tensor | None:
        """Allocate slots for a session. Returns None if the tier is full."""

    @abstractmethod
    def free_slots(self, slots: torch.Tensor) -> None: ...

    # --- the copies ---

    def of(self, session_id: str) -> SessionCopy | None:
        return self._copies.get(session_id)

    @property
    def tokens(self) -> int:
        return sum(copy.end - copy.begin for copy in self._copies.values())

    @property
    def bytes_per_token(self) -> int:
        host_pool = self._controller.mem_pool_host.anchor_entry.host_pool
        n_bytes: int = host_pool.size_per_token  # of the geometry, so the same on all tiers
        return n_bytes

    def rate(self) -> LinkRate:
        """The rate to the device, estimated by that to the tier before the first measurement."""
        known = self.to_device.bytes_per_s or self.to_tier.bytes_per_s
        return LinkRate(known, self.to_device.latency_s)

    @property
    def loading_bytes(self) -> int:
        """Bytes of the copies' own loads that have not ended; equal on all ranks."""
        return self.bytes_per_token * sum(self._loading_tokens.values())

    # --- device to tier ---

    def write(self, session_id: str, kv: LiveKvInfo) -> bool:
        """Copy the tokens that have no copy yet. Returns False, unchanged, if the tier is full.

        The session's device slots must not be freed or overwritten before `written` is waited for.
        """
        copy = self._copies.get(session_id)
        if copy is not None and copy.begin > kv.cache_protected_len:
            self.forget(session_id)
            copy = None
        if copy is None:
            copy = SessionCopy.empty(kv.cache_protected_len)
        end = kv.kv_committed_len
        if end <= copy.end:
            return True
        n_slots = ceil_align(end - copy.begin, self.page_size)
        fresh = self.take_slots(session_id, n_slots - len(copy.slots))
        if fresh is None:
            return False
        copy.slots = torch.cat([copy.slots, fresh])
        # A last page that was not full is written again.
        start = copy.end - (copy.end - copy.begin) % self.page_size
        row = self._cache.req_to_token_pool.req_to_token[kv.req_pool_idx]
        device = self._whole_pages(row[start:end].to(torch.int64))
        self._submit_write(copy, copy.slots[start - copy.begin :], device)
        self.counts["tokens_written"] += end - copy.end
        copy.end = end
        self._copies[session_id] = copy
        return True

    def new_number(self) -> int:
        """The id of a new transfer."""
        return next(self._numbers)

    def _whole_pages(self, device_slots: torch.Tensor) -> torch.Tensor:
        return self._cache._pad_retraction_indices(device_slots, self.page_size)

    def _submit_write(self, copy: SessionCopy, host: torch.Tensor, device: torch.Tensor) -> None:
        controller, transfer = self._controller, self.new_number()
        controller.write_queue.append(CacheOperation(host, device, node_id=transfer))
        began_s = time.monotonic()
        controller.start_writing()
        ack = controller.ack_write_queue[-1]
        if not ack.timing_enabled:  # a transfer without events is synchronous
            self.to_tier.finished(ack.num_bytes, time.monotonic() - began_s)
        copy.busy.add(transfer)
        copy.written = ack.finish_event
        self._writes[transfer] = copy

    # --- tier to device ---

    def load(self, copy: SessionCopy, begin: int, end: int) -> torch.Tensor | None:
        """Queue tokens [begin, end) for SGLang's next prefill, which waits for them layer by layer.

        Returns:
            int64 device slots, whole pages from begin on; None if there is no memory.
        """
        host = self._slots(copy, begin, end)
        self._after_writing(copy)
        transfer = self.new_number()
        device = self._controller.load(host_indices=host, node_id=transfer)
        if device is not None:
            self._began_load(transfer, copy, len(host))
            self._on_path.add(transfer)
            self.counts["tokens_loaded"] += end - begin
        return device

    def preload(self, copy: SessionCopy, begin: int, end: int, device: torch.Tensor) -> Any:
        """Start to load tokens [begin, end) into these device slots. Returns the finish event."""
        controller, engine = self._controller, self._controller.l2_transfer_engine
        host = self._slots(copy, begin, end)
        self._after_writing(copy)
        if controller.load_fence_stream is not None:
            # The forward pass of the slots' previous owner may still write to them.
            engine.host_to_device_stream.wait_stream(controller.load_fence_stream)
        transfer = self.new_number()
        operation = CacheOperation(host, device, node_id=transfer)
        began_s = time.monotonic()
        completion = engine.submit_host_to_device(
            controller._l2_load_transfers(*controller._move_op_indices(operation)),
            transfer_layer_id_max=controller.transfer_layer_id_max,
        )
        n_bytes = controller._transfer_num_bytes(operation)
        if not completion.timing_enabled:
            self.to_device.finished(n_bytes, time.monotonic() - began_s)
        controller.ack_load_queue.append(
            HiCacheAck(
                start_event=completion.start_event,
                finish_event=completion.finish_event,
                node_ids=[transfer],
                num_tokens=len(device),
                timing_enabled=completion.timing_enabled,
                num_tokens_by_pool=controller._num_tokens_by_pool(operation),
                num_bytes=n_bytes,
            )
        )
        self._began_load(transfer, copy, len(host))
        self.counts["tokens_preloaded"] += end - begin
        return completion.finish_event

    def _began_load(self, transfer: int, copy: SessionCopy, n_slots: int) -> None:
        copy.busy.add(transfer)
        self._loads[transfer], self._loading_tokens[transfer] = copy, n_slots

    def _slots(self, copy: SessionCopy, begin: int, end: int) -> torch.Tensor:
        stop = ceil_align(end - copy.begin, self.page_size)
        return copy.slots[begin - copy.begin : stop]

    def _after_writing(self, copy: SessionCopy) -> None:
        if copy.written is not None:
            stream = self._controller.l2_transfer_engine.host_to_device_stream
            stream.wait_event(copy.written)

    # --- the session changes ---

    def forget(self, session_id: str) -> None:
        """Drop the copy of a session that is closed, or whose KV has changed."""
        copy = self._copies.pop(session_id, None)
        if copy is not None:
            copy.gone = True
            self.free_if_gone(copy)

    def truncate(self, session_id: str, n_tokens: int) -> None:
        """Truncate the session's copy."""
        copy = self._copies.get(session_id)
        if copy is None or copy.end <= n_tokens:
            return
        if n_tokens <= copy.begin or copy.busy:
            self.forget(session_id)
            return
        copy.end = n_tokens
        self._keep(copy, torch.arange(ceil_align(n_tokens - copy.begin, self.page_size)))

    def compact(self, session_id: str, compaction: Compaction) -> None:
        """Remove the compacted pages from the session's copy; later pages move up."""
        copy = self._copies.get(session_id)
        if copy is None or copy.end <= compaction.begin:
            return
        if copy.busy or copy.begin > compaction.end:
            self.forget(session_id)
            return
        is_kept = torch.ones(len(copy.slots), dtype=torch.bool)
        first = max(0, compaction.begin - copy.begin)
        is_kept[first : compaction.end - copy.begin] = False
        copy.end = max(copy.end - compaction.n_tokens, compaction.begin)
        copy.begin = min(copy.begin, compaction.begin)
        self._keep(copy, is_kept.nonzero().flatten())

    def _keep(self, copy: SessionCopy, which: torch.Tensor) -> None:
        is_freed = torch.ones(len(copy.slots), dtype=torch.bool)
        is_freed[which] = False
        self.free_slots(copy.slots[is_freed])
        copy.slots = copy.slots[which]

    # --- the tier's memory is short ---

    def shorten(self, session_id: str, end: int) -> None:
        """Drop the copy's tokens from `end` on, which is the start of a page."""
        copy = self._copies[session_id]
        copy.end = end
        self._keep(copy, torch.arange(end - copy.begin))

    def lengthen(self, session_id: str, slots: torch.Tensor, end: int) -> None:
        """Append slots that hold the session's tokens from the copy's end to `end`."""
        copy = self._copies[session_id]
        copy.slots, copy.end = torch.cat([copy.slots, slots]), end

    # --- SGLang acknowledges ---

    def acknowledged(self, transfer: int) -> bool:
        """Record the end of a transfer. Returns False if it is not a session's."""
        copy = self._writes.pop(transfer, None)
        if copy is not None and copy.busy.isdisjoint(self._writes.keys() - {transfer}):
            copy.written = None
        if copy is None and (copy := self._loads.pop(transfer, None)) is None:
            return False
        copy.busy.discard(transfer)
        self._loading_tokens.pop(transfer, None)
        self._on_path.discard(transfer)
        self.free_if_gone(copy)
        return True

    def loads_from(self, copy: SessionCopy) -> bool:
        """Whether a load of this copy has not ended."""
        return not copy.busy.isdisjoint(self._loads)

    def is_loading(self, ack: HiCacheAck) -> bool:
        """Whether the tier, and no other, is the source of these loads."""
        return all(number in self._loads for number in ack.node_ids)

    def loads_any(self, ack: HiCacheAck) -> bool:
        """Whether the tier is a source of these loads."""
        return any(number in self._loads for number in ack.node_ids)

    def is_writing(self, ack: HiCacheAck) -> bool:
        """Whether the tier, and no other, is the target of these writes."""
        return all(number in self._writes for number in ack.node_ids)

    def all_written(self) -> None:
        """To be called when SGLang has waited for every write in its queue, and emptied it."""
        pending = {i for ack in self._controller.ack_write_queue for i in ack.node_ids}
        for transfer in [i for i in self._writes if i not in pending]:
            self.acknowledged(transfer)

    def measure(self, ack: HiCacheAck, link: Link) -> None:
        """Measure a transfer by its device events. To be called before it is acknowledged."""
        if not ack.timing_enabled or not ack.num_bytes:
            return
        seconds = ack.start_event.elapsed_time(ack.finish_event) / 1000
        link.finished(ack.num_bytes, seconds)
        if any(i in self._on_path for i in ack.node_ids):
            self.counts["reload_s"] += seconds

    def free_if_gone(self, copy: SessionCopy) -> None:
        if copy.gone and not copy.busy:
            self.free_slots(copy.slots)
            copy.slots = copy.slots[:0]

    @property
    def _controller(self) -> Any:
        return self._cache.cache_controller

    @property
    def page_size(self) -> int:
        page_size: int = self._cache.page_size
        return page_size


def wait_for(event: Any) -> None:
    """Order all later launches after the event, without blocking the host if there is a device."""
    event.wait(device_module.current_stream())
