"""Entry point of group `sglang.srt.plugins`: SGLang calls it in every process that it starts."""

import os

from sglang_live.bridge import seams


def register() -> None:
    seams.install_or_exit(os.environ.get(seams.STAGE_ENV))
