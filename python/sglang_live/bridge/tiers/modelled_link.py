"""A simulated link between host and device, for machines whose tiers are the same memory.

For tests and measurements of transfer order and waiting: off by default, and named in results.
One queue per direction, as on PCIe: latency, then bytes over bandwidth.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.l2_transfer import L2Transfer, L2TransferEngine, TransferCompletion

# "<GB/s>:<microseconds>"
LINK_ENV = "SGLANG_LIVE_MODELLED_LINK"


class TimedEvent:
    """Takes the role of a device event. `work` runs when a reader observes the event's end."""

    def __init__(self, at_s: float, work: Callable[[], None] = lambda: None):
        self.at_s = at_s
        self._work: Callable[[], None] = work

    def query(self) -> bool:
        if time.monotonic() < self.at_s:
            return False
        self._finish()
        return True

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.at_s - time.monotonic()))
        self._finish()

    def wait(self, stream: Any = None) -> None:
        self.synchronize()

    def record(self, stream: Any = None) -> None:
        pass

    def elapsed_time(self, end: "TimedEvent") -> float:
        """Milliseconds, the unit of torch's events."""
        return 1000 * (end.at_s - self.at_s)

    def _finish(self) -> None:
        work, self._work = self._work, lambda: None
        work()


class ModelledLink(L2TransferEngine):
    """
    Args:
        bytes_per_s, latency_s: of each direction.
    """

    def __init__(self, io_backend: str, bytes_per_s: float, latency_s: float):
        super().__init__(io_backend)
        self._bytes_per_s, self._latency_s = bytes_per_s, latency_s
        self._free_at_s = {"to_host": 0.0, "to_device": 0.0}

    def submit_device_to_host(self, transfers: list[L2Transfer]) -> TransferCompletion:
        began_s, done_s = self._book("to_host", transfers)
        super().submit_device_to_host(transfers)
        return TransferCompletion(TimedEvent(began_s), TimedEvent(done_s), True)

    def submit_host_to_device(
        self,
        transfers: list[L2Transfer],
        *,
        transfer_layer_id_max: int,
        start_event: Any = None,
        on_layer_done: Any = None,
    ) -> TransferCompletion:
        began_s, done_s = self._book("to_device", transfers)

        def copy() -> None:
            L2TransferEngine.submit_host_to_device(
                self,
                transfers,
                transfer_layer_id_max=transfer_layer_id_max,
                start_event=start_event,
                on_layer_done=on_layer_done,
            )

        finish = TimedEvent(done_s, copy)
        if on_layer_done is not None:
            # A forward pass waits for its layers by stream order, which a CPU does not have.
            finish.synchronize()
        return TransferCompletion(TimedEvent(began_s), finish, True)

    def _book(self, direction: str, transfers: list[L2Transfer]) -> tuple[float, float]:
        n_bytes = sum(len(t.device_indices) * t.host_pool.size_per_token for t in transfers)
        began_s = max(time.monotonic(), self._free_at_s[direction])
        done_s = began_s + self._latency_s + n_bytes / self._bytes_per_s
        self._free_at_s[direction] = done_s
        return began_s, done_s


def link_from_env(io_backend: str) -> ModelledLink | None:
    """The simulated link that LINK_ENV describes, or None if it is not set.

    Raises:
        ValueError: the value is malformed.
    """
    text = os.environ.get(LINK_ENV, "")
    if not text:
        return None
    try:
        gb_per_s, latency_us = (float(part) for part in text.split(":"))
        if not (0 < gb_per_s < float("inf") and 0 <= latency_us < float("inf")):
            raise ValueError("out of range")
    except ValueError as error:
        raise ValueError(f"{LINK_ENV} must be <GB/s>:<microseconds>, got {text!r}") from error
    return ModelledLink(io_backend, gb_per_s * 1e9, latency_us * 1e-6)
