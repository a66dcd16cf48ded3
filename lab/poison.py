"""Overwrites KV that leaves its owner with NaN, so that a later read of it shows."""

from collections.abc import Callable
from typing import Any

from lab.attachment import around
from sglang_live.attachment import ATTACH_ENV

POISON = {ATTACH_ENV: "lab.poison:attach"}


def attach(place: str) -> None:
    if place != "sglang":
        return
    from sglang_live.bridge.session import compact

    around(compact, "compact_row", compact_row)


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
