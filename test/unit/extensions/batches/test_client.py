"""`python -m sglang_live.extensions.batches` with a gateway: what it writes, and how it ends."""

import asyncio
import io
import json
from contextlib import asynccontextmanager

import pytest

from sglang_live.extensions.batches.client import (
    BatchError,
    BatchRun,
    Progress,
    main,
    parse_args,
    run,
)
from sglang_live.extensions.batches.extension import NoBatches
from test.unit.extensions.batches.batches import SPEECH, URL, FakeTime, app_with, opened
from test.unit.gateway.fakes import FakeOrchestrator, app_of
from test.unit.gateway.live_server import listening


def lines(*bodies: dict, url: str = URL) -> str:
    return "\n".join(
        json.dumps({"custom_id": str(n), "method": "POST", "url": url, "body": body})
        for n, body in enumerate(bodies)
    )


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text(lines(SPEECH, SPEECH, SPEECH | {"input": ""}))
    return path


@asynccontextmanager
async def served(tmp_path, orchestrator: FakeOrchestrator | None = None, **config):
    store = opened(tmp_path / "batches", FakeTime())
    app = app_with(orchestrator or FakeOrchestrator(n_more=3), store, **config)
    async with listening(app) as address:
        yield f"http://{address}"


def config(url: str, *argv: str) -> BatchRun:
    return parse_args([*argv, "--url", url, "--poll-s", "0.02"])


def ids(path) -> set[str]:
    return {json.loads(line)["custom_id"] for line in path.read_text().splitlines()}


async def test_a_file_is_run_and_its_results_are_written(tmp_path, file, capsys):
    async with served(tmp_path, api_keys=("k",)) as url:
        out = io.StringIO()
        succeeded = await run(config(url, str(file), "--api-key", "k"), Progress(out))
    assert not succeeded
    assert ids(tmp_path / "lines.results.jsonl") == {"0", "1"}
    assert ids(tmp_path / "lines.errors.jsonl") == {"2"}
    assert "completed   [########################] 3/3, 1 failed\n" in out.getvalue()
    assert "--id batch_" in capsys.readouterr().err


async def test_a_batch_that_exists_is_waited_for_by_its_id(tmp_path, file, capsys):
    orchestrator = FakeOrchestrator(n_more=0)
    async with served(tmp_path, orchestrator) as url:
        waiting = asyncio.create_task(run(config(url, str(file)), Progress(io.StringIO())))
        while "--id" not in (said := capsys.readouterr().err):
            await asyncio.sleep(0.02)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        batch_id = said.split("--id ")[1].split()[0]
        orchestrator.n_more = 3
        out = tmp_path / "there.jsonl"
        again = config(url, "--id", batch_id, "--out", str(out))
        await run(again, Progress(io.StringIO()))
    assert ids(out) == {"0", "1"} and ids(tmp_path / "there.errors.jsonl") == {"2"}


async def test_faults_of_the_input_are_shown_by_line(tmp_path, capsys):
    path = tmp_path / "x.jsonl"
    path.write_text(lines(SPEECH) + "\n{")
    async with served(tmp_path) as url:
        assert not await run(config(url, str(path)), Progress(io.StringIO()))
    assert "line 2: This line is not parseable as valid JSON" in capsys.readouterr().err
    assert not (tmp_path / "x.results.jsonl").exists()


async def test_a_refusal_is_an_error_with_the_words_of_the_server(tmp_path, file):
    async with served(tmp_path, api_keys=("k",)) as url:
        with pytest.raises(BatchError, match="HTTP 401"):
            await run(config(url, str(file)), Progress(io.StringIO()))
        unknown = config(url, "--id", "batch_x", "--api-key", "k", "--out", str(tmp_path / "o"))
        with pytest.raises(BatchError, match="No batch found"):
            await run(unknown, Progress(io.StringIO()))
    async with listening(app_of(FakeOrchestrator(), additions=[NoBatches().gateway])) as address:
        with pytest.raises(BatchError, match="--batch-dir"):
            await run(config(f"http://{address}", str(file)), Progress(io.StringIO()))


def test_a_server_that_is_not_there_ends_the_command_in_one_line(file, capsys):
    assert main([str(file), "--url", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: cannot reach")


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["missing.jsonl"],
        ["empty.jsonl"],
        ["lines.jsonl", "--id", "batch_x"],
        ["lines.jsonl", "--out", "missing/out.jsonl"],
        ["lines.jsonl", "--poll-s", "0"],
    ],
)
def test_wrong_arguments_end_with_status_2(file, argv, monkeypatch, capsys):
    monkeypatch.chdir(file.parent)
    (file.parent / "empty.jsonl").write_text("\n[]\n")
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2 and "error: " in capsys.readouterr().err


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(status: str, n_done: int, total: int, **more) -> dict:
    counts = {"completed": n_done, "failed": 0, "total": total}
    return {"status": status, "request_counts": counts, "paused": None, **more}


def test_a_terminal_has_one_line_with_the_time_that_is_left():
    out, now = FakeTerminal(), iter([0.0, 10.0])
    progress = Progress(out, lambda: next(now))
    progress.show(shown("validating", 0, 0))
    progress.show(shown("in_progress", 0, 40))
    progress.show(shown("in_progress", 10, 40))
    progress.show(shown("in_progress", 10, 40, paused="storage_full"))
    progress.end()
    frames = out.getvalue().split("\r")[1:]
    assert frames[0] == "validating " and frames[1].startswith("in_progress [......")
    assert frames[2] == "in_progress [######..................] 10/40, 0:00:30 left"
    assert "paused: the server's disk is full" in frames[3] and frames[3].endswith("\n")


async def test_a_server_that_restarts_is_waited_for(tmp_path, file, monkeypatch, capsys):
    monkeypatch.setattr("sglang_live.extensions.batches.client._RETRY_S", 0.02)
    gone = []
    async with served(tmp_path, FakeOrchestrator(n_more=0)) as url:
        port = int(url.rpartition(":")[2])
        progress = Progress(io.StringIO())
        progress.offline = gone.append
        waiting = asyncio.create_task(run(config(url, str(file)), progress))
        while "--id" not in capsys.readouterr().err:
            await asyncio.sleep(0.02)
    async with asyncio.timeout(10):
        while not gone:
            await asyncio.sleep(0.02)
    store = opened(tmp_path / "batches", FakeTime())
    app = app_with(FakeOrchestrator(n_more=3), store)
    async with listening(app, lambda uvicorn: setattr(uvicorn, "port", port)), asyncio.timeout(10):
        assert await waiting is False
    assert ids(tmp_path / "lines.results.jsonl") == {"0", "1"}
