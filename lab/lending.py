"""Constants of lending with which a test takes seconds, and NaN in pages that leave a session."""

import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from lab.attachment import around
from sglang_live.attachment import ATTACH_ENV
from sglang_live.extensions.lending.policy import LendingConfig

LENDING_ENV = "LAB_LENDING"
# As lab/poison.py, in pages that other engines lend.
POISON = {ATTACH_ENV: "lab.lending:attach_poison"}


def environment(**constants: float) -> dict[str, str]:
    """constants: of LendingConfig."""
    return {ATTACH_ENV: "lab.lending:attach", LENDING_ENV: json.dumps(constants)}


def attach(place: str) -> None:
    if place == "sglang":
        from sglang_live.extensions.lending.engine import part as product

        constants = json.loads(os.environ[LENDING_ENV])
        LendingConfig(**constants)  # raises now, not in the scheduler
        assert product.LendingConfig is LendingConfig
        product.LendingConfig = partial(LendingConfig, **constants)  # type: ignore[misc, assignment]


def attach_poison(place: str) -> None:
    if place != "sglang":
        return
    from sglang_live.extensions.lending.engine.borrowing import Borrowing
    from sglang_live.extensions.lending.engine.peer_copies import PeerCopies

    around(PeerCopies, "free_slots", free_lent_slots)
    around(Borrowing, "_forget", forget_lease)


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
    from sglang_live.extensions.lending.engine.shared_memory import Launched

    lease = lender.held[row]
    for begin, end in lender.memory.ranges(lease.first, lease.n_slots):
        lender.mapped.raw[begin:end] = 0xFF  # NaN in every floating-point type
    Launched(borrowing._device).synchronize()
    forget(borrowing, lender, row)
