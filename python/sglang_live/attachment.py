"""Code from outside of the package, loaded into each process of the stages.

For laboratories, which measure the server, disturb it or model its device: SGLANG_LIVE_ATTACH names
functions, "module:function,…". Each is called once in the process of a stage, before the stage
exists, and once in every process in which SGLang runs, when the seams are in place.
"""

import logging
import os
import pkgutil
from typing import Literal

log = logging.getLogger(__name__)

ATTACH_ENV = "SGLANG_LIVE_ATTACH"


def attach(place: Literal["stage", "sglang"]) -> None:
    """Call the functions with the place; what they raise ends the process."""
    for name in filter(None, os.environ.get(ATTACH_ENV, "").split(",")):
        # It writes its lines as this package does, where libraries write warnings only.
        logging.getLogger(name.partition(".")[0]).setLevel(logging.INFO)
        log.warning("attached code=%s place=%s", name, place)
        pkgutil.resolve_name(name)(place)
