"""How fast KV moves between two tiers, from the transfers that were made.

Owner: one Link per direction and engine rank: the two directions of PCIe do not slow each other
down, and reading pinned memory is not as fast as writing it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """
    weight: of one transfer in the moving averages: the last handful counts, for traffic of other
        stages on the same link comes and goes within seconds.
    min_bytes: what is smaller tells the fixed cost, not the bandwidth: on PCIe at 25 GB/s this
        much takes 40 us, of the order of a copy's launch and synchronisation.
    """

    weight: float = 0.2
    min_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1:
            raise ValueError(f"weight must be above 0, at most 1, got {self.weight}")
        if self.min_bytes < 1:
            raise ValueError(f"min_bytes must be positive, got {self.min_bytes}")


class Link:
    """
    Attributes:
        latency_s: a small transfer's time; 0 before the first one.
    """

    def __init__(self, config: LinkConfig | None = None) -> None:
        self._config = config or LinkConfig()
        self.latency_s = 0.0
        # Averaged, not its inverse: a few very fast transfers must not hide the slow ones.
        self._s_per_byte: float | None = None
        self._latency_seen = False

    @property
    def bytes_per_s(self) -> float | None:
        """Fixed costs included, which is on the safe side. None: not measured yet."""
        return None if self._s_per_byte is None else 1.0 / self._s_per_byte

    def finished(self, n_bytes: int, seconds: float) -> None:
        """A transfer is over. seconds: from its start on the link, waiting in line not included.

        Ignored if it took no time, as when clocks are coarse.
        """
        if n_bytes <= 0 or seconds <= 0:
            return
        if n_bytes < self._config.min_bytes:
            known_s = self.latency_s if self._latency_seen else seconds
            self.latency_s = self._mixed(known_s, seconds)
            self._latency_seen = True
        else:
            sample = seconds / n_bytes
            known = sample if self._s_per_byte is None else self._s_per_byte
            self._s_per_byte = self._mixed(known, sample)

    def _mixed(self, known: float, sample: float) -> float:
        return known + self._config.weight * (sample - known)
