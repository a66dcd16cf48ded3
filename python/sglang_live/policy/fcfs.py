"""Stock order: as they came."""

import numpy as np

from sglang_live.policy.view import StageView


def order(view: StageView) -> np.ndarray:
    waiting = view.waiting.nonzero()[0]
    return waiting[np.argsort(view.arrived_s[waiting], kind="stable")]
