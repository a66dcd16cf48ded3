"""A lender's memory as a pool of SGLang's transfers, and transfers to and from it.

Slots of the pool in host memory are below PEER_SLOTS; each lender's are in a range of their own
above. So a load that a prefill waits for may have tokens of several tiers, and a number says which.
Owner: PeerCopies.
"""

from typing import Any

import torch
from sglang.srt.mem_cache.l2_transfer import L2Transfer

from sglang_live.bridge.platform.kv_copy import copy_rows
from sglang_live.extensions.lending.layout import UNIT_BYTES, Geometry, n_rows

# Beyond every host pool, and beyond the rows of one lender.
PEER_SLOTS = 1 << 40


class PeerPool:
    """
    Args:
        raw: uint8, the lender's mapped memory.
        geometry: the borrower's.
    """

    shared_allocation_domain = None

    def __init__(self, raw: torch.Tensor, geometry: Geometry, device_pool: Any):
        self.layer_num = geometry.n_layers
        self.size_per_token = geometry.envelope_bytes
        dtype = device_pool.store_dtype
        flat, unit = raw.view(dtype), UNIT_BYTES // dtype.itemsize
        rows = n_rows(raw.numel(), geometry.envelope_bytes)
        heads, k_dim, v_dim = geometry.n_heads, geometry.k_dim, geometry.v_dim
        # A row at every unit: rows overlap, slots of leases do not.
        self.k = torch.as_strided(
            flat,
            (rows, self.layer_num, heads, k_dim),
            (unit, heads * k_dim, k_dim, 1),
        )
        self.v = torch.as_strided(
            flat,
            (rows, self.layer_num, heads, v_dim),
            (unit, heads * v_dim, v_dim, 1),
            storage_offset=geometry.k_items,
        )

    # --- what SGLang's transfer engine calls ---

    def prepare_transfer_indices(
        self, rows: torch.Tensor, device: torch.Tensor, io_backend: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._on_device(rows), self._on_device(device)

    def _on_device(self, indices: torch.Tensor) -> torch.Tensor:
        if indices.device == self.k.device:
            return indices
        # From pinned memory, so that the scheduler does not wait for the device.
        return indices.pin_memory().to(self.k.device, non_blocking=True)

    def load_to_device_per_layer_physical(
        self,
        device_pool: Any,
        rows: torch.Tensor,
        device: torch.Tensor,
        layer_id: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        device_pool.k_buffer[layer_id][device] = self.k[rows, layer_id]
        device_pool.v_buffer[layer_id][device] = self.v[rows, layer_id]

    def backup_from_device_all_layer_physical(
        self, device_pool: Any, rows: torch.Tensor, device: torch.Tensor, io_backend: str
    ) -> None:
        for layer in range(self.layer_num):
            self.k[rows, layer] = device_pool.k_buffer[layer][device]
            self.v[rows, layer] = device_pool.v_buffer[layer][device]


class PeerPools:
    """The pools of all lenders, by the range of their slots.

    Args:
        controller: SGLang's; its transfers go to and from these pools where a slot is theirs.
    """

    def __init__(self, controller: Any):
        self._pools: dict[int, PeerPool] = {}
        self._n_added = 0
        self._anchor = controller.mem_pool_host.anchor_entry
        self._host_transfers = controller._l2_transfers
        controller._l2_transfers = self._transfers

    def add(self, pool: PeerPool) -> int:
        """Returns the first slot number of the pool, which no other pool has had."""
        self._n_added += 1
        base = self._n_added * PEER_SLOTS
        self._pools[base] = pool
        return base

    def remove(self, base: int) -> None:
        del self._pools[base]

    def __len__(self) -> int:
        return len(self._pools)

    def transfers(self, slots: torch.Tensor, other: torch.Tensor) -> list[L2Transfer]:
        """One transfer per pool.

        Args:
            slots: of these pools.
            other: slots on the other side.
        """
        found = []
        bases = slots - slots % PEER_SLOTS
        for base in bases.unique().tolist():
            mine = bases == base
            found.append(
                L2Transfer(
                    host_pool=self._pools[base],
                    device_pool=self._anchor.device_pool,
                    host_indices=slots[mine] - base,
                    device_indices=other[mine],
                    layer_mapper=self._anchor.layer_mapper,
                )
            )
        return found

    def _transfers(
        self, slots: torch.Tensor, device: torch.Tensor, others: Any = None
    ) -> list[L2Transfer]:
        """HybridCacheController._l2_transfers."""
        is_peer = slots >= PEER_SLOTS
        if not is_peer.any():
            transfers: list[L2Transfer] = self._host_transfers(slots, device, others)
            return transfers
        on_host = self._host_transfers(slots[~is_peer], device[~is_peer], others)
        return [*on_host, *self.transfers(slots[is_peer], device[is_peer])]


class MoveToHost:
    """Takes the role of a pool in a transfer whose other side is host memory.

    Indices stay on the host.
    """

    shared_allocation_domain = None

    def __init__(self, pools: PeerPools, host_pool: Any):
        self._pools = pools
        self._host = host_pool

    def prepare_transfer_indices(
        self, host: torch.Tensor, slots: torch.Tensor, io_backend: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return host, slots

    def backup_from_device_all_layer_physical(
        self, _: Any, host: torch.Tensor, slots: torch.Tensor, io_backend: str
    ) -> None:
        for transfer in self._pools.transfers(slots, host):
            pool: PeerPool = transfer.host_pool
            layers = [lent[:, i] for lent in (pool.k, pool.v) for i in range(pool.layer_num)]
            to = [*self._host.k_buffer, *self._host.v_buffer]
            copy_rows(layers, to, transfer.host_indices, transfer.device_indices, page_size=1)
