"""Other constants of lending than the product's, with which a test takes seconds."""

import json
import os
from functools import partial

from sglang_live.attachment import ATTACH_ENV
from sglang_live.kv.lending import LendingConfig

LENDING_ENV = "LAB_LENDING"


def environment(**constants: float) -> dict[str, str]:
    """constants: of LendingConfig."""
    return {ATTACH_ENV: "lab.lending:attach", LENDING_ENV: json.dumps(constants)}


def attach(place: str) -> None:
    if place == "sglang":
        from sglang_live.bridge.scheduler import lending as product

        constants = json.loads(os.environ[LENDING_ENV])
        LendingConfig(**constants)  # raises now, not in the scheduler
        assert product.LendingConfig is LendingConfig
        product.LendingConfig = partial(LendingConfig, **constants)  # type: ignore[misc, assignment]
