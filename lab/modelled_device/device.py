"""The modelled device of this process: what work costs there, and its clock."""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

from lab.modelled_device.clock import COMPUTE, DeviceClock, ModelledEvent, Work
from sglang_live.extensions.planner.device_model.costs import EngineCosts
from sglang_live.extensions.planner.device_model.model import DeviceModel, load_device_model
from sglang_live.stages.spec import StageSpec

# Value: absolute path of the device model's file.
DEVICE_MODEL_ENV = "LAB_DEVICE_MODEL"


class ModelledDevice:
    """
    observers: called with the work of each batch of an engine after its launch.
    """

    def __init__(self, stage: str, model: DeviceModel, clock: DeviceClock):
        self.stage = stage
        self.model = model
        self.clock = clock
        self.observers: list[Callable[[Work], None]] = []
        self._loads_done_s = 0.0

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
            not_before_s = self._loads_done_s + cost_s / self.engine_costs.n_layers
            self._loads_done_s = 0.0
        work = self.clock.book(COMPUTE, cost_s, launched_s=launched_s, not_before_s=not_before_s)
        return ModelledEvent(
            work, lambda asked_s, now_s: self.clock.count(launched_s, work, asked_s, now_s)
        )

    def next_batch_waits(self, done_s: float) -> None:
        """Have the batch that is launched next wait for loads, layer by layer.

        Args:
            done_s: end of the loads.
        """
        self._loads_done_s = max(self._loads_done_s, done_s)


@cache
def modelled_device() -> ModelledDevice:
    """The device of the stage to which this process belongs.

    Raises:
        BadInputError: the device model cannot be read.
    """
    spec = StageSpec.from_env()
    model = load_device_model(Path(os.environ[DEVICE_MODEL_ENV]))
    path = Path(spec.run_dir) / f"clock-{spec.device.replace(':', '-')}"
    return ModelledDevice(spec.stage, model, DeviceClock(path, spec.stage, spec.replica))
