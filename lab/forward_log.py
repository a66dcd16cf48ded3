"""Log of the times in which a stage's model computes, to find other causes of delay in a turn.

Times are CLOCK_MONOTONIC, which all processes of a machine share. Steps that are replayed from a
graph run no Python and are not in it.
"""

import atexit
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lab.attachment import around
from sglang_live.attachment import ATTACH_ENV
from sglang_live.stages.spec import StageSpec

log = logging.getLogger(__name__)

FORWARD_LOG_ENV = "LAB_FORWARD_LOG"


class ForwardLog:
    """Writes `begin end` lines, in seconds, to a file of this process."""

    def __init__(self, directory: Path, stage: str):
        self._file = (directory / f"{stage}-{os.getpid()}.log").open(
            "w", buffering=1, encoding="utf-8"
        )
        self._failed = False
        atexit.register(self._close)

    def _close(self) -> None:
        with suppress(OSError):
            self._file.close()

    def compute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around what computes."""
        begin = time.monotonic()
        try:
            return function(*args, **kwargs)
        finally:
            self._write(f"{begin:.6f} {time.monotonic():.6f}\n")

    def _write(self, line: str) -> None:
        if self._failed:
            return
        try:
            self._file.write(line)
        except OSError as error:
            # A full disk must not end the engine. The spans written so far stay useful.
            self._failed = True
            log.error("forward_log_ends file=%s error=%s", self._file.name, error.strerror)


def environment(directory: Path) -> dict[str, str]:
    return {ATTACH_ENV: "lab.forward_log:attach", FORWARD_LOG_ENV: str(directory)}


def attach(place: str) -> None:
    stage = StageSpec.from_env().stage
    if (place == "stage") != (stage == "vocoder"):
        return
    owner: type
    match stage:
        case "vocoder":
            from sglang_live.stages.vocoder.batcher import VocoderBatch

            owner = VocoderBatch
            name = "launch"
        case "talker":
            from sglang_live.models.speech_lm.engine.talker import SpeechLM

            owner = SpeechLM
            name = "forward"
        case "thinker":
            from sglang_live.models.qwen3_omni.engine import thinker

            owner = thinker.Qwen3OmniMoeForConditionalGeneration
            name = "_forward_tapped"
        case _:
            return
    around(owner, name, ForwardLog(Path(os.environ[FORWARD_LOG_ENV]), stage).compute)


def read_spans(directory: Path) -> list[tuple[float, float]]:
    """The spans of all stages, ordered by their begin."""
    lines = [
        line for path in directory.glob("*.log") for line in path.read_text("utf-8").splitlines()
    ]
    spans = (line.split() for line in lines)
    return sorted((float(begin), float(end)) for begin, end in spans)


def covered_s(spans: list[tuple[float, float]], begin: float, end: float) -> float:
    """Seconds of [begin, end] in which at least one span runs."""
    covered = 0.0
    at = begin
    for first, last in spans:
        first = max(first, at)
        last = min(last, end)
        if last > first:
            covered += last - first
            at = last
    return covered
