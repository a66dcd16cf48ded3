"""A prompt at which the thinker's scheduler dies or hangs.

A round whose prompts contain some token ids in sequence raises, or never returns.
"""

import os
import time
from collections.abc import Iterable
from typing import Any

from sglang.srt.managers.schedule_batch import ScheduleBatch

from sglang_live.bridge.scheduler.part import Part
from sglang_live.engine_channel.inbox import PARTS_ENV, STAGE_ENV

# "die:5,6,7" or "hang:5,6,7".
FAULT_ENV = "LAB_FAULT"


def environment(action: str, token_ids: Iterable[int]) -> dict[str, str]:
    """action: "die" or "hang"."""
    fault = f"{action}:{','.join(map(str, token_ids))}"
    return {PARTS_ENV: "lab.fault_injection:part", FAULT_ENV: fault}


def part(scheduler: Any) -> Part:
    is_thinker = os.environ[STAGE_ENV] == "thinker"
    return FaultInjection(scheduler) if is_thinker else Part(scheduler)


class FaultInjection(Part):
    def __init__(self, scheduler: Any):
        """Raises ValueError if the variable does not have the form above."""
        super().__init__(scheduler)
        text = os.environ[FAULT_ENV]
        self._action, _, ids = text.partition(":")
        if self._action not in ("die", "hang"):
            raise ValueError(f"{FAULT_ENV} is die:IDS or hang:IDS, got {text!r}")
        self._ids = [int(token) for token in ids.split(",")]

    def before_launch(self, batch: ScheduleBatch) -> None:
        """Raises RuntimeError, or never returns, if a prompt contains the ids."""
        if not any(self._is_in(list(req.origin_input_ids)) for req in batch.reqs):
            return
        if self._action == "die":
            raise RuntimeError("a prompt contains the ids of the fault")
        while True:
            time.sleep(1)

    def _is_in(self, prompt: list[int]) -> bool:
        n = len(self._ids)
        return any(prompt[at : at + n] == self._ids for at in range(len(prompt) - n + 1))
