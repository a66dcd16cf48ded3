"""Faults for tests: a prompt at which the thinker's scheduler dies or hangs.

SGLANG_LIVE_TEST_FAULT, "die:5,6,7" or "hang:5,6,7": a round whose prompts contain these token
ids in sequence raises, or never returns. Without the variable nothing is injected.
"""

import os
import time
from collections.abc import Iterable, Sequence

FAULT_ENV = "SGLANG_LIVE_TEST_FAULT"


class FaultInjection:
    def __init__(self, text: str):
        """Raises ValueError if text does not have the form above."""
        self._action, _, ids = text.partition(":")
        if self._action not in ("die", "hang"):
            raise ValueError(f"{FAULT_ENV} is die:IDS or hang:IDS, got {text!r}")
        self._ids = [int(token) for token in ids.split(",")]

    @staticmethod
    def from_env() -> "FaultInjection | None":
        text = os.environ.get(FAULT_ENV)
        return FaultInjection(text) if text else None

    def meet(self, prompts: Iterable[Sequence[int]]) -> None:
        """Raises RuntimeError, or never returns, if a prompt contains the ids."""
        if not any(self._is_in(list(prompt)) for prompt in prompts):
            return
        if self._action == "die":
            raise RuntimeError("test hook: a prompt contains the ids of the fault")
        while True:
            time.sleep(1)

    def _is_in(self, prompt: list[int]) -> bool:
        n = len(self._ids)
        return any(prompt[at : at + n] == self._ids for at in range(len(prompt) - n + 1))
