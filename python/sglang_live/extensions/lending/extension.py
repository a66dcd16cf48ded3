"""The flags --lend, --lend-memory-gib and --borrow: what lends KV memory, and what borrows it.

With the default window of retention a session is small, its load is hidden by preload, and host
memory is larger than what a neighbouring stage can spare. A device whose memory another stage
leaves idle, long sessions, or a host with little memory make lending worthwhile.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_live.devices import DEFAULT_DEVICE, read_devices
from sglang_live.errors import BadInputError
from sglang_live.extension import Addition, Extension
from sglang_live.extensions.lending.channel import BORROW, LEND
from sglang_live.extensions.lending.policy import LeaseConfig
from sglang_live.policy.policies import Policies
from sglang_live.settings import NonNegative, Settings, flag, read_flags

if TYPE_CHECKING:
    from sglang_live.stages.spec import StageConfig

# Stages with a KV pool, and those whose sessions have tiers.
_LENDERS = ("thinker", "talker")
_BORROWERS = ("thinker",)
# SGLang's arguments of which a stage that lends or borrows has one, and what that means.
_UNSUPPORTED = {"pp_size": "all layers on each rank", "nnodes": "all ranks on this host"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingFlags(Settings):
    lend: str = flag(
        "", "these stages lend idle pages of their KV pools", value="STAGES", unset="none"
    )
    lend_memory_gib: NonNegative = flag(
        0.0, "a process without an engine lends this much to each that borrows", unset="none"
    )
    lend_memory_device: str = flag(
        "",
        "GPU that has the memory of --lend-memory-gib; a list has one for each that borrows",
        value="NAMES",
        unset=DEFAULT_DEVICE,
    )
    borrow: str = flag(
        "", "these stages keep idle sessions' KV in lent pages first", value="STAGES", unset="none"
    )


class LendingExtension(Extension):
    title = "lending"
    flags = LendingFlags

    def addition(
        self, own: argparse.Namespace, policies: Policies, stages: "Mapping[str, StageConfig]"
    ) -> Addition | None:
        config = leases_of(read_flags(own, LendingFlags), policies, stages)
        if not config.roles:
            return None
        from sglang_live.extensions.lending.lending import Lending

        return Lending(config)


def leases_of(
    flags: LendingFlags, policies: Policies, stages: "Mapping[str, StageConfig]"
) -> LeaseConfig:
    """Raises BadInputError: names the flag, and why nothing can be gained."""
    lend = _stages("--lend", flags.lend, _LENDERS, "have a KV pool")
    borrow = _stages("--borrow", flags.borrow, _BORROWERS, "have sessions that can be evicted")
    lent_bytes = _lent_bytes(flags.lend_memory_gib)
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
    named = flags.lend_memory_device
    devices = read_devices("--lend-memory-device", named or DEFAULT_DEVICE)
    n_borrowers = sum(stages[stage].replicas for stage in borrow)
    if lent_bytes and len(devices) not in (1, n_borrowers):
        raise BadInputError(
            f"--lend-memory-device names {len(devices)} devices for {n_borrowers} that borrow: "
            "name one for each, or a single one"
        )
    return LeaseConfig(
        roles=roles, lent_bytes=lent_bytes, lent_devices=devices, names_devices=bool(named)
    )


def _lent_bytes(gib: float) -> int:
    """Raises BadInputError: it is too small for a lease."""
    if 0 < gib < 1 / 16:
        raise BadInputError(f"--lend-memory-gib {gib:g}: less than one lease, which has 0.0625")
    return int(gib * (1 << 30))


def _check(stage: str, settings: "StageConfig") -> None:
    if settings.connect:
        raise BadInputError(f"--{stage}.connect: pages are lent on one host only")
    for name, why in _UNSUPPORTED.items():
        if settings.args.get(name, 1) != 1:
            flag = f"--{stage}.{name.replace('_', '-')} {settings.args[name]}"
            raise BadInputError(f"{flag}: a stage that lends or borrows has {why}")


def _check_ranks(lend: list[str], borrow: list[str], stages: "Mapping[str, StageConfig]") -> None:
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


def _stages(flag: str, text: str, known: tuple[str, ...], what: str) -> list[str]:
    named = [name.strip() for name in text.split(",") if name.strip()]
    for name in named:
        if name not in known:
            raise BadInputError(f"{flag} {name}: {' and '.join(known)} {what}")
    return list(dict.fromkeys(named))


EXTENSION = LendingExtension()
