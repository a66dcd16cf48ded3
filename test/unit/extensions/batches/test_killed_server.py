"""A gateway that is killed again and again finishes its batches, with each result once."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from sglang_live.extensions.batches.records import ENDED
from sglang_live.stages.ports import free_port

from .batches import URL, input_of

N_LINES = 30
_PATIENCE_S = 60.0
ROOT = Path(__file__).parents[4]


@contextmanager
def server(folder: Path, port: int) -> Iterator[subprocess.Popen]:
    module = "test.unit.extensions.batches.killed_server"
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(folder), str(port)],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT / 'python'}:{ROOT}", "PATH": ""},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def asked(call, *args, **kwargs):
    """The response of a server that may still be starting."""
    async with asyncio.timeout(_PATIENCE_S):
        while True:
            try:
                return await call(*args, **kwargs)
            except openai.APIConnectionError:
                await asyncio.sleep(0.1)


async def test_a_killed_server_goes_on_with_each_result_once(tmp_path):
    port = free_port()
    client = openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
    )
    batch, n_done, kept = None, 0, b""
    for n_until in (3, 12, 21):
        with server(tmp_path, port):
            if batch is None:
                data = input_of(str(n) for n in range(N_LINES))
                file = await asked(client.files.create, file=("x", data), purpose="batch")
                batch = await client.batches.create(
                    input_file_id=file.id, endpoint=URL, completion_window="24h"
                )
            async with asyncio.timeout(_PATIENCE_S):
                while n_done < n_until:
                    await asyncio.sleep(0.03)
                    now = await asked(client.batches.retrieve, batch.id)
                    assert now.request_counts.completed >= n_done, "a result that counted is lost"
                    n_done = now.request_counts.completed
        [output] = [p for p in (tmp_path / "files").iterdir() if p.name != batch.input_file_id]
        assert output.read_bytes().startswith(kept), "results that counted do not change"
        kept = b"".join(output.read_bytes().splitlines(keepends=True)[:n_done])
    with server(tmp_path, port):
        now = await asked(client.batches.retrieve, batch.id)
        async with asyncio.timeout(_PATIENCE_S):
            while now.status not in ENDED:
                await asyncio.sleep(0.05)
                now = await client.batches.retrieve(batch.id)
        text = (await client.files.content(now.output_file_id)).content
        assert (now.status, now.request_counts.completed) == ("completed", N_LINES)
        assert text.startswith(kept)
        ids = [json.loads(line)["custom_id"] for line in text.splitlines()]
        assert sorted(ids, key=int) == [str(n) for n in range(N_LINES)]
        with pytest.raises(openai.ConflictError):
            await client.batches.cancel(now.id)
