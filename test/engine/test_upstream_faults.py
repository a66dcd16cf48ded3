"""Faults of the pinned SGLang that a seam repairs. Drop the seam when upstream repairs it."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.asyncio(loop_scope="session"),
]


async def seen(fault: str, checkpoint: Path) -> dict:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "test.engine.stock_fault", fault, str(checkpoint)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    out, _ = await asyncio.wait_for(process.communicate(), 180)
    return json.loads(next(line for line in out.splitlines() if line.startswith(b"{")))


async def test_stock_sglang_admits_a_third_turn_beside_a_running_one(endless_checkpoint):
    """The seam session_rejects_cleanly repairs it."""
    told = await seen("third-turn", endless_checkpoint)
    assert told == {"second_refused": True, "third_admitted": True}
