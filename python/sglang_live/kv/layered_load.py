"""How long a prefill waits within for KV that is loaded layer by layer.

In: sizes of the load, rates of link and engine. Out: the device's wait.
SwiftCache (arXiv 2606.16135): layer i + 1 arrives while layer i computes, so a load is hidden if
the bytes of a layer over the bandwidth take no longer than a layer computes.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredLoad:
    """
    Attributes:
        n_bytes, n_layers: of the load.
        bytes_per_s: bandwidth of the link to the device.
        queue_s: time until the link begins with it: what is queued, and a transfer's fixed cost.
        encoder_s: computation before the first layer.
        compute_s: computation of all layers.
    """

    n_bytes: int
    n_layers: int
    bytes_per_s: float
    queue_s: float
    encoder_s: float
    compute_s: float

    @property
    def stall_s(self) -> float:
        """Time for which the prefill's kernels wait for layers that have not arrived."""
        load_s = self.n_bytes / self.bytes_per_s / self.n_layers
        layer_s = self.compute_s / self.n_layers
        # The first layer is the latest where layers arrive faster than they compute, otherwise the
        # last one.
        latest_s = max(load_s, self.n_layers * load_s - (self.n_layers - 1) * layer_s)
        return max(0.0, self.queue_s + latest_s - self.encoder_s)

    @property
    def hidden_bytes(self) -> int:
        """The largest load whose layers arrive as fast as they compute."""
        return int(self.compute_s * self.bytes_per_s)
