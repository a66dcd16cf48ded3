"""Processes of an engine as forks, in a stage that is one itself."""

import multiprocessing
import os

from sglang_live.bridge.platform.forking import Forking
from sglang_live.stages.zygote import FORKED_ENV

TARGET = "sglang.srt.entrypoints.engine.mp"
KIND = "define"
SIGNATURE = None
WHY = "a process that begins anew imports for eleven seconds what its parent has imported already"
DROP_WHEN = "upstream forks its processes where there is no device"
STAGES = ("thinker", "talker")
CPU_ONLY = True

# Elsewhere it is what it was.
HOOK = Forking() if FORKED_ENV in os.environ else multiprocessing
