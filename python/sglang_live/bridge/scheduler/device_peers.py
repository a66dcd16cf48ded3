"""Urgency of the later stages that share a device with this engine.

In: after each round, whether an urgent request of this engine can run. Out: whether one of a
later stage can, and would run sooner if this engine left the device idle.
A file in the server's run directory, which all engines of a device map, has one time per engine.
Owner: one DevicePeers per engine, in rank 0; its result is sent with the request broadcast.
"""

import mmap
import os
from pathlib import Path

import numpy as np

DEVICE_PEERS_ENV = "SGLANG_LIVE_DEVICE_PEERS"
# Lifetime of a published urgency: an engine that sleeps or has died does not withdraw it.
VALID_S = 0.1
_STAGES = ("thinker", "talker", "vocoder")  # in the order of the pipeline
_MAX_REPLICAS = 1024


def device_peers_env(run_dir: str, device: str, stage: str, replica: int) -> str:
    """The value of DEVICE_PEERS_ENV: the engine's index in the file, and the file.

    Raises:
        ValueError: the replica's number exceeds the file's size.
    """
    if not 0 <= replica < _MAX_REPLICAS:
        raise ValueError(f"at most {_MAX_REPLICAS} replicas of a stage, got number {replica}")
    place = _STAGES.index(stage) * _MAX_REPLICAS + replica
    return f"{place}:{Path(run_dir) / ('urgent-' + device.replace(':', '-'))}"


class DevicePeers:
    """
    Args:
        path: of the file, which is created if absent.
        place: this engine's index in the file.
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
        """Returns None if DEVICE_PEERS_ENV is not set."""
        place, _, path = os.environ.get(DEVICE_PEERS_ENV, "").partition(":")
        return cls(Path(path), int(place)) if path else None

    def publish(self, urgent: bool, now_s: float) -> None:
        """Publish whether an urgent request of this engine can run.

        Args:
            now_s: time.monotonic(), which is the same clock in all processes of a host.
        """
        self._own[0] = now_s + VALID_S if urgent else 0.0

    def urgent(self, now_s: float) -> bool:
        """Whether a request is urgent in an engine of a later stage."""
        return bool(self._later.max(initial=0.0) > now_s)
