"""Faults of the pinned SGLang that a seam mends. Where one is gone upstream, drop the seam."""

import asyncio
import json
import sys

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]


async def test_stock_still_admits_a_third_turn_beside_a_running_one(endless_checkpoint):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "test.engine.stock_fault", str(endless_checkpoint)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    out, _ = await asyncio.wait_for(process.communicate(), 180)
    seen = json.loads(next(line for line in out.splitlines() if line.startswith(b"{")))
    assert seen == {"second_refused": True, "third_admitted": True}
