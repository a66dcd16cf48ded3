"""Tells what sessions drop, and before which token: one line of JSON for each compaction."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.attachment import around
from sglang_live.attachment import ATTACH_ENV

_FILE_ENV = "LAB_COMPACTIONS"


def told_in(file: Path) -> dict[str, str]:
    return {ATTACH_ENV: "lab.compactions:attach", _FILE_ENV: str(file)}


def attach(place: str) -> None:
    if place != "sglang":
        return
    from sglang_live.bridge.session.compact import SessionCompaction

    around(SessionCompaction, "_drop", drop)


def drop(
    drop: Callable[..., None], owner: Any, slot: Any, req: Any, compaction: Any, n_tokens: int
) -> None:
    """Around SessionCompaction._drop. before: place, among all tokens that the session ever had, of
    the first one that is computed without what is dropped."""
    told = {
        "session": req.session.session_id,
        "before": slot.kv.kv_committed_len + slot.kv.n_dropped,
        "begin": compaction.begin,
        "n_tokens": compaction.n_tokens,
    }
    with open(os.environ[_FILE_ENV], "a", encoding="utf-8") as file:
        file.write(json.dumps(told) + "\n")
    drop(owner, slot, req, compaction, n_tokens)
