"""What rank 0 of an engine has seen of its leases, which all ranks act on in the same round.

Each rank lends or borrows memory of its own, but the engine's sessions, its radix tree and its
free pages are the same on all ranks, so leases must begin and end on all of them in one round.
Rank 0 reads the shared tables (extensions/lending/table.py), in which a fact is there only when
every rank has written its word of it, and its clock. With several ranks the facts then travel with
SGLang's broadcast of requests; a single rank uses them at once.
"""

from dataclasses import dataclass

from sglang.srt.runtime_context import get_parallel

from sglang_live.extensions.lending.channel import Member
from sglang_live.extensions.lending.table import Lease


@dataclass(frozen=True, slots=True)
class LenderFacts:
    """
    Attributes:
        now_s: rank 0's time.
        begins: all ranks have met the borrower.
        is_lost: all processes of the borrower have ended.
        left: rows of leases that all its ranks have left.
        used: slots that the borrower uses, by row; of an engine with several ranks.
    """

    now_s: float
    begins: bool
    is_lost: bool
    left: tuple[int, ...]
    used: dict[int, int]


@dataclass(frozen=True, slots=True)
class BorrowerFacts:
    """
    Attributes:
        now_s: rank 0's time.
        host_rate: bytes per second to the host, as rank 0 has measured it; None: not yet.
        begun: pairs with lenders that all ranks have met.
        lost: pairs of whose lender a process has ended.
        leases: to accept or to leave, with their pairs.
    """

    now_s: float
    host_rate: float | None
    begun: tuple[str, ...]
    lost: tuple[str, ...]
    leases: tuple[tuple[str, Lease], ...]


def member_of(name: str, path: str) -> Member:
    """This rank; to be called on all ranks at once.

    Args:
        name: of the engine; rank 0's is taken.
        path: of the broker's socket.
    """
    parallel = get_parallel()
    if parallel.tp_size == 1:
        return Member(name, path)
    common: str = parallel.tp_group.broadcast_object(name)
    return Member(common, path, parallel.tp_rank, parallel.tp_size)


def unsupported_ranks() -> str | None:
    """Why ranks of this engine can neither lend nor borrow; None if they can."""
    parallel = get_parallel()
    if parallel.pp_size > 1:
        return f"pp: {parallel.pp_size} stages have different layers, and batches of their own"
    if parallel.attn_dp_enabled:
        return "dp: groups of ranks have requests of their own"
    return None
