"""On which devices the replicas of the stages are, and what a divided thinker costs."""

from collections.abc import Iterator
from dataclasses import dataclass

from sglang_live.extensions.planner.device_model.costs import ThinkerCosts

# Estimate: an all-reduce of some kilobytes over NVLink. There are two for each layer.
_ALL_REDUCE_S = 10e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """
    thinkers, talkers, vocoders: the device of each replica, by number; of a thinker its first one.
    thinker_tp: devices of a thinker, from its first one on. No other stage is on them if they are
        several.
    """

    thinkers: tuple[int, ...] = (0,)
    talkers: tuple[int, ...] = (0,)
    vocoders: tuple[int, ...] = (0,)
    thinker_tp: int = 1

    def __post_init__(self) -> None:
        if not (self.thinkers and self.talkers and self.vocoders) or self.thinker_tp < 1:
            raise ValueError("a server has at least one replica of each stage")
        if self.thinker_tp == 1:
            return
        own = [device for ranks in self.thinker_ranks for device in ranks]
        if len(set(own)) < len(own) or {*self.talkers, *self.vocoders} & set(own):
            raise ValueError("a divided thinker shares its devices with no other replica")

    @property
    def thinker_ranks(self) -> Iterator[range]:
        """The devices of each thinker."""
        return (range(first, first + self.thinker_tp) for first in self.thinkers)

    @property
    def n_devices(self) -> int:
        used = {device for ranks in self.thinker_ranks for device in ranks}
        return len(used | {*self.talkers, *self.vocoders})

    def is_shared(self, device: int) -> bool:
        """Whether several stages use a device."""
        ranks = [one for ranks in self.thinker_ranks for one in ranks]
        return sum(device in used for used in (ranks, self.talkers, self.vocoders)) > 1


# All stages on one device, and a device for each.
SHARED, APART = Placement(), Placement(talkers=(1,), vocoders=(2,))


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedCosts:
    """A thinker on several devices (--thinker.tp-size): an estimate, not in a device model.

    What grows with streams and tokens is divided; the fixed times are bound by latency and stay,
    and all-reduces are added.
    """

    whole: ThinkerCosts
    n_devices: int

    @property
    def kv_token_bytes(self) -> float:
        """Of one device: heads are divided."""
        return self.whole.kv_token_bytes / self.n_devices

    @property
    def n_layers(self) -> float:
        return self.whole.n_layers

    def decode_s(self, n_streams: int, kv_tokens: int) -> float:
        fixed_s = self.whole.decode_s(0, 0)
        grows_s = self.whole.decode_s(n_streams, kv_tokens) - fixed_s
        return fixed_s + grows_s / self.n_devices + 2 * self.n_layers * _ALL_REDUCE_S

    def prefill_s(self, n_tokens: int, audio_s: float) -> float:
        """Each device has whole encoders, and encodes all of the audio."""
        fixed_s = self.whole.prefill_s(0, audio_s)
        grows_s = self.whole.prefill_s(n_tokens, audio_s) - fixed_s
        return fixed_s + grows_s / self.n_devices + 2 * self.n_layers * _ALL_REDUCE_S
