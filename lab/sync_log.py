"""Where a scheduler's process waits for its GPU, with the stack of each place.

Each scheduler writes `PID.json` to a folder. PyTorch warns of an operator that waits
(`torch.cuda.set_sync_debug_mode`); a wait for an event is not one of them, so that results which
are due do not count. For benchmark/gpu/syncs.py.
"""

import json
import os
import threading
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from sglang_live.bridge.scheduler.part import Part
from sglang_live.engine_channel.inbox import PARTS_ENV, STAGE_ENV

SYNC_LOG_ENV = "LAB_SYNC_LOG"
# PyTorch's words, in c10/cuda/CUDAFunctions.cpp.
_WARNING = "called a synchronizing CUDA operation"
_FRAMES = 12
# Between two places that are new the counts on disk may be behind by this.
_WRITE_EVERY = 64


def environment(folder: Path) -> dict[str, str]:
    return {PARTS_ENV: "lab.sync_log:SyncLogPart", SYNC_LOG_ENV: str(folder)}


class SyncLog:
    def __init__(self, path: Path, engine: str):
        self._path = path
        self._engine = engine
        self._places: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._show = warnings.showwarning

    def begin(self) -> None:
        warnings.filterwarnings("always", message=f".*{_WARNING}")
        warnings.showwarning = self._on_warning
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        self._write()

    def _on_warning(self, message: Warning | str, *args: Any, **named: Any) -> None:
        if _WARNING not in str(message):
            self._show(message, *args, **named)
            return
        frames = traceback.extract_stack(limit=_FRAMES)[:-1]
        stack = "\n".join(f"{f.filename}:{f.lineno} {f.name}" for f in reversed(frames))
        with self._lock:
            place = threading.current_thread().name, stack
            self._places[place] += 1
            n = self._places[place]
        if n == 1 or n % _WRITE_EVERY == 0:
            self._write()

    def _write(self) -> None:
        with self._lock:
            places = [
                {"thread": thread, "n": n, "stack": stack.splitlines()}
                for (thread, stack), n in self._places.most_common()
            ]
            whole = self._path.with_suffix(".part")
            whole.write_text(json.dumps({"engine": self._engine, "places": places}), "utf-8")
            whole.replace(self._path)


class SyncLogPart(Part):
    """Begins when graphs have been captured."""

    def start(self) -> None:
        engine = "thinker" if os.environ[STAGE_ENV] == "thinker" else "talker"
        SyncLog(Path(os.environ[SYNC_LOG_ENV]) / f"{os.getpid()}.json", engine).begin()
