"""Overwrites KV that leaves its owner with NaN, so that a later read of it shows."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lab.attachment import around
from sglang_live.attachment import ATTACH_ENV

POISON = {ATTACH_ENV: "lab.poison:attach"}


def attach(place: str) -> None:
    if place != "sglang":
        return
    from sglang_live.bridge.session import compact
    from sglang_live.bridge.tiers.borrowing import Borrowing
    from sglang_live.bridge.tiers.peer_copies import PeerCopies

    around(compact, "compact_row", compact_row)
    around(PeerCopies, "free_slots", free_lent_slots)
    around(Borrowing, "_forget", forget_lease)


def compact_row(
    compact: Callable[..., None], cache: Any, kv: Any, compaction: Any, own_from: int
) -> None:
    """Around compact.compact_row: what it frees."""
    row = cache.req_to_token_pool.req_to_token[kv.req_pool_idx]
    slots = row[own_from : compaction.end].long()
    pool = cache.token_to_kv_pool_allocator.get_kvcache()
    for layer in range(pool.start_layer, pool.start_layer + pool.layer_num):
        pool.get_key_buffer(layer)[slots] = float("nan")
        pool.get_value_buffer(layer)[slots] = float("nan")
    compact(cache, kv, compaction, own_from)


def free_lent_slots(free: Callable[..., None], copies: Any, slots: Tensor) -> None:
    """Around PeerCopies.free_slots: slots in pages that other engines lend."""
    overwrite_lent(copies._pools, slots)
    free(copies, slots)


def overwrite_lent(pools: Any, slots: Tensor) -> None:
    for transfer in pools.transfers(slots, slots):
        pool = transfer.host_pool
        for layer in range(pool.layer_num):
            pool.k[transfer.host_indices, layer] = float("nan")
            pool.v[transfer.host_indices, layer] = float("nan")


def forget_lease(forget: Callable[..., None], borrowing: Any, lender: Any, row: int) -> None:
    """Around Borrowing._forget: all pages of a lease, before its lender has them back."""
    from sglang_live.bridge.memory.shared_memory import Launched

    lease = lender.held[row]
    for begin, end in lender.memory.ranges(lease.first, lease.n_slots):
        lender.mapped.raw[begin:end] = 0xFF  # NaN in every floating-point type
    Launched(borrowing._device).synchronize()
    forget(borrowing, lender, row)
