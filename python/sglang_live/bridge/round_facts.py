"""What a scheduler tells its Rounds in every round: the stamp of rank 0, and its memory."""

from dataclasses import dataclass

from sglang_live.policy.round_cost import UNMEASURED as UNMEASURED_COST
from sglang_live.policy.round_cost import RoundCost
from sglang_live.policy.view import StageRates

UNMEASURED = StageRates()


@dataclass(frozen=True, slots=True)
class LinkRate:
    """A measured link to the device.

    Attributes:
        bytes_per_s: None before the first measurement.
        latency_s: duration of a small transfer.
    """

    bytes_per_s: float | None
    latency_s: float


UNMEASURED_LINK = LinkRate(None, 0.0)


@dataclass(frozen=True, slots=True)
class RoundStamp:
    """Rank 0's time and measurements, sent with the request broadcast: all ranks decide alike.

    Attributes:
        rates: of the batches whose results have arrived.
        n_done: number of the latest of them.
        prefill_done_s: arrival of the latest prefill's result.
        cost: what rounds take; for best effort.
    """

    now_s: float
    rates: StageRates = UNMEASURED
    n_done: int = 0
    prefill_done_s: float = 0.0
    cost: RoundCost = UNMEASURED_COST


@dataclass(frozen=True, slots=True)
class LinkStamp:
    """Rank 0's time, and what it has measured of the links to its device, as RoundStamp.

    Attributes:
        rate: of the link from the host.
        nearer_rate: of the link from a tier between the device and the host.
    """

    now_s: float
    rate: LinkRate = UNMEASURED_LINK
    nearer_rate: LinkRate = UNMEASURED_LINK


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """KV tokens of the engine, and its free request rows.

    Attributes:
        free: KV tokens that a prefill could take now.
        idle: those of them that idle sessions hold.
        wanted: KV of a user who speaks waits for room, so as to be loaded ahead.
    """

    free: int
    total: int
    free_rows: int
    idle: int = 0
    wanted: bool = False

    @property
    def occupancy(self) -> float:
        return 1.0 - self.free / self.total if self.total else 0.0
