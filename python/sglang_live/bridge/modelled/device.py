"""The modelled device of this process: what work costs there, and its clock."""

import os
from functools import cache
from pathlib import Path

from sglang_live.bridge.modelled.clock import (
    COMPUTE,
    DEVICE_CLOCK_ENV,
    DeviceClock,
    ModelledEvent,
)
from sglang_live.device_model.costs import EngineCosts
from sglang_live.device_model.model import DEVICE_MODEL_ENV, DeviceModel, load_device_model


class ModelledDevice:
    def __init__(self, stage: str, model: DeviceModel, clock: DeviceClock):
        self.stage, self.model, self.clock = stage, model, clock
        self._loads_done_s, self._n_layers = 0.0, 1

    @property
    def engine_costs(self) -> EngineCosts:
        """Of this stage, which is thinker or talker."""
        costs: EngineCosts = getattr(self.model, self.stage)
        return costs

    def compute(self, cost_s: float, launched_s: float) -> ModelledEvent:
        """Book a batch. Its lateness is counted when its end is observed."""
        not_before_s = 0.0
        if self._loads_done_s:
            # On a GPU each layer waits for its own KV: the last one computes after its load.
            not_before_s = self._loads_done_s + cost_s / self._n_layers
            self._loads_done_s = 0.0
        work = self.clock.book(COMPUTE, cost_s, launched_s=launched_s, not_before_s=not_before_s)
        return ModelledEvent(
            work, lambda asked_s, now_s: self.clock.count(launched_s, work, asked_s, now_s)
        )

    def next_batch_waits(self, done_s: float, n_layers: int) -> None:
        """Have the batch that is launched next wait for loads, layer by layer.

        Args:
            done_s: end of the loads.
        """
        self._loads_done_s, self._n_layers = max(self._loads_done_s, done_s), n_layers


@cache
def modelled_device() -> ModelledDevice | None:
    """The device that the environment describes, or None if the device is not modelled.

    Raises:
        BadInputError: the device model cannot be read.
    """
    path, place = os.environ.get(DEVICE_MODEL_ENV, ""), os.environ.get(DEVICE_CLOCK_ENV, "")
    if not path or not place:
        return None
    stage, number, file = place.split(":", 2)
    model = load_device_model(Path(path))
    return ModelledDevice(stage, model, DeviceClock(Path(file), int(number)))
