"""Engines that share a device know when somebody is urgent in a later stage.

In: after each round, whether this engine could help somebody. Out: whether one nearer to the ear
could, and would sooner if this one left the device to it.
A file in the server's run directory, which all engines of a device map: one time per engine.
Owner: one DevicePeers per engine, in rank 0; its answer rides the request broadcast.
"""

import mmap
import os
from pathlib import Path

import numpy as np

DEVICE_PEERS_ENV = "SGLANG_LIVE_DEVICE_PEERS"
# An engine that sleeps, or has died, says no more that it is not in need.
LASTS_S = 0.1
_STAGES = ("thinker", "talker", "vocoder")  # towards the ear
_MAX_REPLICAS = 1024


def device_peers_env(run_dir: str, device: str, stage: str, replica: int) -> str:
    """For DEVICE_PEERS_ENV: which file, and which place in it.

    Raises:
        ValueError: the file has no place for so many replicas.
    """
    if not 0 <= replica < _MAX_REPLICAS:
        raise ValueError(f"at most {_MAX_REPLICAS} replicas of a stage, got number {replica}")
    place = _STAGES.index(stage) * _MAX_REPLICAS + replica
    return f"{place}:{Path(run_dir) / ('urgent-' + device.replace(':', '-'))}"


class DevicePeers:
    """
    Args:
        path: of the file; created if absent.
        place: of this engine in it.
    """

    def __init__(self, path: Path, place: int):
        n_bytes = 8 * len(_STAGES) * _MAX_REPLICAS
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(handle, n_bytes)
            until_s = np.frombuffer(mmap.mmap(handle, n_bytes), np.float64)
        finally:
            os.close(handle)
        own_stage = place // _MAX_REPLICAS
        self._own, self._later = until_s[place:][:1], until_s[(own_stage + 1) * _MAX_REPLICAS :]

    @classmethod
    def from_env(cls) -> "DevicePeers | None":
        """None where nobody said with whom this engine shares its device."""
        place, _, path = os.environ.get(DEVICE_PEERS_ENV, "").partition(":")
        return cls(Path(path), int(place)) if path else None

    def tell(self, urgent: bool, now_s: float) -> None:
        """now_s: monotonic, which is one clock for all processes of a host."""
        self._own[0] = now_s + LASTS_S if urgent else 0.0

    def urgent(self, now_s: float) -> bool:
        """Whether somebody is urgent in an engine nearer to the ear."""
        return bool(self._later.max(initial=0.0) > now_s)
