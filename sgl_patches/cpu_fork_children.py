"""An engine's processes are forks in a stage that is a fork itself."""

import multiprocessing
import os

from sglang_live.bridge.platform.forking import Forking
from sglang_live.stages.zygote import FORKED_ENV

TARGET = "sglang.srt.entrypoints.engine.mp"
KIND = "define"
SIGNATURE = None
WHY = "a spawned process imports again, in eleven seconds, what its parent has imported"
DROP_WHEN = "upstream forks its processes if there is no device"
STAGES = ("thinker", "talker", "piece_talker")
CPU_ONLY = True

# In other processes the name keeps its value.
HOOK = Forking() if FORKED_ENV in os.environ else multiprocessing
