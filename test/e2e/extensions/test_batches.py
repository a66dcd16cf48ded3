"""Batches on the whole server, with OpenAI's unmodified client, also after it was killed."""

import base64
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest
import soundfile as sf

from sglang_live.extensions.batches.client import main
from test.e2e.conftest import DATA, SENTENCES, Server, running_server, wait_until

pytestmark = [pytest.mark.e2e]

ENDED = ("completed", "failed", "expired", "cancelled")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SPEAK, TRANSCRIBE = "/v1/audio/speech", "/v1/audio/transcriptions"
HI = {"model": "demo", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 8}
SPOKEN = HI | {"modalities": ["text", "audio"], "audio": {"voice": "ethan", "format": "wav"}}
SPEECH = {
    "model": "demo",
    "voice": "ethan",
    "input": SENTENCES,
    "response_format": "wav",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    batches = str(tmp_path_factory.mktemp("batches"))
    logs = tmp_path_factory.mktemp("server")
    with running_server("demo-random", logs, "--batch-dir", batches) as running:
        yield running


def client_of(server: Server, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.http}/v1", api_key=key, max_retries=0, timeout=60)


def lines_of(url: str, *bodies: dict) -> bytes:
    lines = [
        {"custom_id": str(n), "method": "POST", "url": url, "body": body}
        for n, body in enumerate(bodies)
    ]
    return "\n".join(map(json.dumps, lines)).encode()


def create(client: openai.OpenAI, url: str, *bodies: dict) -> openai.types.Batch:
    file = client.files.create(file=("in.jsonl", lines_of(url, *bodies)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")


def ended(client: openai.OpenAI, batch: openai.types.Batch) -> openai.types.Batch:
    deadline_s = time.monotonic() + 120
    while batch.status not in ENDED:
        assert time.monotonic() < deadline_s, batch
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    return batch


def results(client: openai.OpenAI, batch: openai.types.Batch) -> dict[int, dict]:
    """Responses by the number of their line."""
    found: dict[int, dict] = {}
    for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
        for text in client.files.content(file_id).text.splitlines():
            line = json.loads(text)
            assert int(line["custom_id"]) not in found
            found[int(line["custom_id"])] = line["response"]
    return found


def test_every_endpoint_has_the_results_of_its_route(server):
    client = client_of(server)
    sound = (DATA / "sp_librivox_0880.flac").read_bytes()
    transcribed = {"model": "demo", "file": base64.b64encode(sound).decode()}
    batches = [
        create(client, CHAT, HI, HI | {"max_tokens": -1}, SPOKEN),
        create(client, COMPLETIONS, {"model": "demo", "prompt": "Once", "max_tokens": 4}),
        create(client, SPEAK, SPEECH, SPEECH | {"input": ""}),
        create(client, TRANSCRIBE, transcribed),
    ]
    done = [ended(client, batch) for batch in batches]
    assert [batch.status for batch in done] == ["completed"] * 4
    chat, completion, speech, transcript = [results(client, batch) for batch in done]
    assert chat[0]["status_code"] == 200 and chat[0]["body"]["choices"][0]["message"]["content"]
    assert chat[1]["status_code"] == 400 and chat[1]["body"]["error"]["param"] == "max_tokens"
    spoken = chat[2]["body"]["choices"][0]["message"]["audio"]
    for body, n_least in ((spoken["data"], 1), (speech[0]["body"]["audio"], 12_000)):
        samples, rate_hz = sf.read(io.BytesIO(base64.b64decode(body)))
        assert rate_hz == 24_000 and len(samples) > n_least
    assert speech[1]["status_code"] == 400
    assert completion[0]["body"]["choices"][0]["text"] is not None
    assert transcript[0]["status_code"] == 200 and transcript[0]["body"]["text"]
    server.wait_until_free()


def test_the_command_writes_the_results(server, tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_bytes(lines_of(SPEAK, SPEECH, SPEECH))
    assert main([str(file), "--url", server.http, "--poll-s", "0.2"]) == 0
    lines = (tmp_path / "in.results.jsonl").read_text().splitlines()
    assert {json.loads(line)["custom_id"] for line in lines} == {"0", "1"}


def kill(server: Server) -> None:
    """End the server without a word, and wait until its stages have followed it."""
    stages = psutil.Process(server.process.pid).children(recursive=True)
    server.process.kill()
    server.process.wait()
    _, alive = psutil.wait_procs(stages, timeout=30)
    assert not alive


def test_a_killed_server_loses_no_result_and_the_next_one_goes_on(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batches")
    flags = ("--api-key", "alice", "--api-key", "bob", "--batch-dir", str(folder))
    flags += ("--batch-at-once", "2")
    n_lines = 12
    with running_server("demo-random", tmp_path_factory.mktemp("killed"), *flags) as server:
        alice, bob = client_of(server, "alice"), client_of(server, "bob")
        batch = create(alice, SPEAK, *([SPEECH] * n_lines))

        def n_done() -> int:
            return alice.batches.retrieve(batch.id).request_counts.completed

        wait_until(lambda: n_done() >= 3, 60, "some lines are done")
        kept = n_done()
        kill(server)
    before = texts_in(folder)
    assert len(before) >= kept
    with running_server("demo-random", tmp_path_factory.mktemp("next"), *flags) as server:
        alice, bob = client_of(server, "alice"), client_of(server, "bob")
        with pytest.raises(openai.NotFoundError):
            bob.batches.retrieve(batch.id)
        with pytest.raises(openai.NotFoundError):
            bob.files.content(batch.input_file_id)
        batch = ended(alice, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", n_lines)
        assert set(results(alice, batch)) == set(range(n_lines))
        after = alice.files.content(batch.output_file_id).content.splitlines(keepends=True)
        assert after[:kept] == before[:kept], "results that were counted are the same bytes"


def texts_in(folder: Path) -> list[bytes]:
    """Complete lines of results on the disk."""
    texts = [path.read_bytes() for path in (folder / "files").iterdir()]
    lines = [line for text in texts for line in text.splitlines(keepends=True)]
    return [line for line in lines if line.startswith(b'{"id":"batch_req_') and line[-1:] == b"\n"]
