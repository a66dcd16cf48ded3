"""Entry point of group `sglang.srt.plugins`; SGLang calls it in every process that it starts."""

import os

from sglang_live.bridge import seams
from sglang_live.bridge.platform.tree_core import use_matching_tree_core
from sglang_live.bridge.scheduler.progress_lock import forgo_progress_lock
from sglang_live.engine_channel.inbox import STAGE_ENV
from sglang_live.telemetry.log_lines import log_in_lines


def register() -> None:
    log_in_lines()
    forgo_progress_lock()
    use_matching_tree_core()
    seams.install_or_exit(os.environ.get(STAGE_ENV))
