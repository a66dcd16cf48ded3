"""With policies off, the thinker's engine makes the same batches as stock SGLang."""

import asyncio
import sys

import pytest

from test.engine.batch_log import batches

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]


async def run(checkpoint, *stage: str) -> tuple[bytes, list]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "test.engine.batch_log", str(checkpoint), *stage),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, log = await asyncio.wait_for(process.communicate(), 180)
    responses = next(line for line in out.splitlines() if line.startswith(b"[["))
    return responses, batches((out + log).decode())


async def test_batches_equal_those_of_stock_sglang(endless_checkpoint):
    stock_answers, stock = await run(endless_checkpoint)
    our_answers, ours = await run(endless_checkpoint, "thinker")
    assert ours == stock
    assert our_answers == stock_answers
    kinds = [kind for kind, *_ in stock]
    assert kinds.count("Prefill") > 5
    assert kinds.count("Decode") > 30
