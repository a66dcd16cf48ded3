"""Stock order: waiting streams by arrival."""

import numpy as np

from sglang_live.policy.view import Ints, StageView


def order(view: StageView) -> Ints:
    waiting = view.waiting.nonzero()[0]
    return waiting[np.argsort(view.arrived_s[waiting], kind="stable")]
