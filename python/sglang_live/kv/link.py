"""Measured speed of the link between two tiers of KV.

Owner: one Link per direction and engine rank: the two directions of PCIe do not slow each other
down, and reading pinned memory is not as fast as writing it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """
    weight: weight of one transfer in the moving averages: about the latest five count, because
        traffic of other stages on the same link changes within seconds.
    min_bytes: smaller transfers measure the fixed cost, not the bandwidth: on PCIe at 25 GB/s
        this size takes 40 us, of the order of a copy's launch and synchronisation.
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
        latency_s: duration of a small transfer; 0 before the first one.
    """

    def __init__(self, config: LinkConfig | None = None) -> None:
        self._config = config or LinkConfig()
        self.latency_s = 0.0
        # The mean is of this and not of its inverse: a few fast transfers must not hide slow ones.
        self._s_per_byte: float | None = None
        self._latency_seen = False

    @property
    def bytes_per_s(self) -> float | None:
        """Bandwidth, fixed costs included, so rather too low; None: not measured yet."""
        return None if self._s_per_byte is None else 1.0 / self._s_per_byte

    def finished(self, n_bytes: int, seconds: float) -> None:
        """Record a transfer. A transfer of no bytes, or of no time by a coarse clock, is ignored.

        seconds: duration on the link, without the time in its queue.
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
