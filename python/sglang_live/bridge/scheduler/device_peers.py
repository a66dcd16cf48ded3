"""What later stages that share a device with this engine need of it.

In: after each round, whether an urgent request of this engine can run, and for how long its
listeners could wait. Out: the same of later stages, which would run sooner if this engine left the
device idle.
A file in the server's run directory, which all engines of a device map, has two times per engine.
An engine of several ranks uses the files of all its devices.
Owner: one DevicePeers per engine, in rank 0; its result is sent with the request broadcast.
"""

import json
import math
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sglang_live.bridge.rounds import Rounds

DEVICE_PEERS_ENV = "SGLANG_LIVE_DEVICE_PEERS"
# Lifetime of a published urgency: an engine that sleeps or has died does not withdraw it.
VALID_S = 0.1
# A listener who has heard nothing for so long is not protected: their engine may have died.
MOST_SILENT_S = 1.0
_STAGES = ("thinker", "talker", "vocoder")  # in the order of the pipeline
_MAX_REPLICAS = 1024
_URGENT, _GAP = range(2)  # rows of a file: until when a request is urgent, and when there is a gap


def device_peers_env(run_dir: str, devices: Iterable[str], stage: str, replica: int) -> str:
    """The value of DEVICE_PEERS_ENV: the engine's index in the files, and the files.

    Raises:
        ValueError: the replica's number exceeds the file's size.
    """
    if not 0 <= replica < _MAX_REPLICAS:
        raise ValueError(f"at most {_MAX_REPLICAS} replicas of a stage, got number {replica}")
    place = _STAGES.index(stage) * _MAX_REPLICAS + replica
    files = [Path(run_dir) / ("urgent-" + device.replace(":", "-")) for device in devices]
    return json.dumps([place, *map(str, files)])


class DevicePeers:
    """
    Args:
        paths: of the files, one per device, which are created if absent.
        place: this engine's index in each.
    """

    def __init__(self, paths: Iterable[Path], place: int):
        own_stage = place // _MAX_REPLICAS
        files = [_mapped(path) for path in paths]
        self._own = [times[:, place] for times in files]
        self._later = [times[:, (own_stage + 1) * _MAX_REPLICAS :] for times in files]

    @classmethod
    def from_env(cls) -> "DevicePeers":
        """Without DEVICE_PEERS_ENV the engine shares no device."""
        place, *paths = json.loads(os.environ.get(DEVICE_PEERS_ENV) or "[0]")
        return cls(map(Path, paths), place)

    def publish(self, rounds: Rounds) -> None:
        """Publish what this engine's latest decision says of its requests.

        Args:
            rounds: its time is time.monotonic(), the same clock in all processes of a host.
        """
        for own in self._own:
            own[_URGENT] = rounds.now_s + VALID_S if rounds.urgent else 0.0
            own[_GAP] = rounds.gap_at_s if rounds.gap_at_s < math.inf else 0.0

    def urgent(self, now_s: float) -> bool:
        """Whether a request is urgent in an engine of a later stage."""
        return any(later[_URGENT].max(initial=0.0) > now_s for later in self._later)

    def slack_s(self, now_s: float) -> float:
        """Time for which the listeners of later stages could wait; inf: none listens."""
        least_s = math.inf
        for later in self._later:
            gap_at_s = later[_GAP]
            listens = gap_at_s > now_s - MOST_SILENT_S
            least_s = min(least_s, gap_at_s.min(where=listens, initial=math.inf) - now_s)
        return max(0.0, least_s)


def _mapped(path: Path) -> npt.NDArray[np.float64]:
    """[2, engines], shared with the other processes."""
    n_bytes = 2 * 8 * len(_STAGES) * _MAX_REPLICAS
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(handle, n_bytes)
        return np.frombuffer(mmap.mmap(handle, n_bytes), np.float64).reshape(2, -1)
    finally:
        os.close(handle)
