"""The flags --lend, --lend-memory-gib and --borrow: what lends KV memory, and what borrows it.

All are off by default: with the default window of retention a session is small, its load is hidden
by preload, and host memory is larger than what a neighbouring stage can spare. A device whose
memory another stage leaves idle, long sessions, or a host with little memory make it worthwhile.
"""

import argparse
from collections.abc import Mapping
from typing import Any

from sglang_live.devices import DEFAULT_DEVICE, read_devices
from sglang_live.engine_channel.lease_channel import BORROW, LEND
from sglang_live.errors import BadInputError
from sglang_live.kv.lending import LeaseConfig
from sglang_live.policy.policies import Policies

# Stages with a KV pool, and those whose sessions have tiers.
_LENDERS, _BORROWERS = ("thinker", "talker"), ("thinker",)
# SGLang's arguments of which a stage that lends or borrows has one, and what that means.
_UNSUPPORTED = {"pp_size": "all layers on each rank", "nnodes": "all ranks on this host"}


def add_lease_arguments(flags: argparse._ActionsContainer) -> None:
    flags.add_argument(
        "--lend",
        metavar="STAGES",
        help="these stages lend idle pages of their KV pools (default: none)",
    )
    flags.add_argument(
        "--lend-memory-gib",
        type=float,
        default=0.0,
        metavar="GIB",
        help="a process without an engine lends this much to each that borrows (default: none)",
    )
    flags.add_argument(
        "--lend-memory-device",
        metavar="NAMES",
        help="GPU that has the memory of --lend-memory-gib; a list has one for each that borrows "
        f"(default: {DEFAULT_DEVICE})",
    )
    flags.add_argument(
        "--borrow",
        metavar="STAGES",
        help="these stages keep idle sessions' KV in lent pages first (default: none)",
    )


def leases_of(
    own: argparse.Namespace, policies: Policies, stages: Mapping[str, Any]
) -> LeaseConfig:
    """Raises BadInputError: names the flag, and why nothing can be gained."""
    lend = _stages("--lend", own.lend, _LENDERS, "have a KV pool")
    borrow = _stages("--borrow", own.borrow, _BORROWERS, "have sessions that can be evicted")
    lent_bytes = _lent_bytes(own.lend_memory_gib)
    if bool(lend or lent_bytes) != bool(borrow):
        raise BadInputError(
            "--borrow gains nothing without --lend or --lend-memory-gib, nor they without it"
        )
    for stage in lend:
        if stage in borrow:
            raise BadInputError(
                f"--lend {stage}: a stage that borrows may not lend, since each of two such stages "
                "could wait for the other's pages"
            )
    for stage in (*lend, *borrow):
        _check(stage, stages[stage])
    _check_ranks(lend, borrow, stages)
    for stage in borrow:
        args = stages[stage].args
        if not policies.next_use or not args.get("enable_hierarchical_cache"):
            raise BadInputError(
                f"--borrow {stage}: a recall moves KV to host memory: it needs the policy next-use "
                f"and --{stage}.enable-hierarchical-cache"
            )
    if lend and not policies:
        raise BadInputError("--lend: SGLang's own scheduling, without policies, lends nothing")
    roles = dict.fromkeys(lend, LEND) | dict.fromkeys(borrow, BORROW)
    named = own.lend_memory_device
    devices = read_devices("--lend-memory-device", named or DEFAULT_DEVICE)
    n_borrowers = sum(stages[stage].replicas for stage in borrow)
    if lent_bytes and len(devices) not in (1, n_borrowers):
        raise BadInputError(
            f"--lend-memory-device names {len(devices)} devices for {n_borrowers} that borrow: "
            "name one for each, or a single one"
        )
    return LeaseConfig(
        roles=roles, lent_bytes=lent_bytes, lent_devices=devices, names_devices=named is not None
    )


def _lent_bytes(gib: float) -> int:
    """Raises BadInputError: it is no size, or too small for a lease."""
    if not 0 <= gib < float("inf"):
        raise BadInputError(f"--lend-memory-gib {gib:g}: a size, at least 0")
    if 0 < gib < 1 / 16:
        raise BadInputError(f"--lend-memory-gib {gib:g}: less than one lease, which has 0.0625")
    return int(gib * (1 << 30))


def _check(stage: str, settings: Any) -> None:
    if settings.connect:
        raise BadInputError(f"--{stage}.connect: pages are lent on one host only")
    for name, why in _UNSUPPORTED.items():
        if settings.args.get(name, 1) != 1:
            flag = f"--{stage}.{name.replace('_', '-')} {settings.args[name]}"
            raise BadInputError(f"{flag}: a stage that lends or borrows has {why}")


def _check_ranks(lend: list[str], borrow: list[str], stages: Mapping[str, Any]) -> None:
    """Rank r borrows from rank r, and a stage has as much room as its rank with the least."""
    n_ranks = {stage: stages[stage].args.get("tp_size", 1) for stage in (*lend, *borrow)}
    for lender in lend:
        for borrower in borrow:
            if n_ranks[lender] != n_ranks[borrower]:
                raise BadInputError(
                    f"--lend {lender}: it has {n_ranks[lender]} ranks (--{lender}.tp-size), and "
                    f"{borrower}, which borrows from it, has {n_ranks[borrower]}: each rank "
                    "borrows from one of the same number"
                )


def _stages(flag: str, text: str | None, known: tuple[str, ...], what: str) -> list[str]:
    named = [name.strip() for name in (text or "").split(",") if name.strip()]
    for name in named:
        if name not in known:
            raise BadInputError(f"{flag} {name}: {' and '.join(known)} {what}")
    return list(dict.fromkeys(named))
