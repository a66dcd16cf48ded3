"""/v1/files and /v1/batches, as OpenAI's client uses them."""

import asyncio
import base64
import io
import json
from contextlib import asynccontextmanager

import httpx
import numpy as np
import openai
import pytest
import soundfile as sf
from msgspec import inspect

from sglang_live.core import OUTPUT_RATE_HZ
from sglang_live.errors import CapacityError
from sglang_live.extensions.batches.extension import NoBatches
from sglang_live.extensions.batches.in_process import InProcess, line_endpoints
from sglang_live.extensions.batches.records import ENDED
from sglang_live.extensions.batches.routes import BatchForm
from sglang_live.extensions.batches.store import Store
from sglang_live.gateway.chat.messages import SpokenAnswers
from sglang_live.gateway.flex.gate import FlexConfig, FlexGate
from test.unit.gateway.chat.test_messages import ANSWERS, SPOKEN, history, with_id
from test.unit.gateway.fakes import MODEL, FakeOrchestrator, app_of, services, voice
from test.unit.gateway.http.test_framing import NAMES, form_of
from test.unit.gateway.live_server import listening
from test.unit.gateway.native.test_proxy import FakeSglang
from test.unit.gateway.test_every_setting import optional_fields

from .batches import SPEECH, FakeTime, app_with, input_of, opened

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SPEAK, TRANSCRIBE = "/v1/audio/speech", "/v1/audio/transcriptions"
_PATIENCE_S = 15.0


class Client:
    """An OpenAI client of one key, and what the tests do with it."""

    def __init__(self, address: str, key: str = "none"):
        self.url, self.headers = f"http://{address}/v1", {"Authorization": f"Bearer {key}"}
        self.api = openai.AsyncOpenAI(base_url=self.url, api_key=key, max_retries=0)

    async def upload(self, data: bytes) -> openai.types.FileObject:
        return await self.api.files.create(file=("lines.jsonl", data), purpose="batch")

    async def create(self, url: str, bodies: list[dict], **more) -> openai.types.Batch:
        lines = [
            {"custom_id": str(n), "method": "POST", "url": url, "body": body}
            for n, body in enumerate(bodies)
        ]
        file = await self.upload("\n".join(map(json.dumps, lines)).encode())
        return await self.api.batches.create(
            input_file_id=file.id, endpoint=url, completion_window="24h", **more
        )

    async def ended(self, batch: openai.types.Batch) -> openai.types.Batch:
        async with asyncio.timeout(_PATIENCE_S):
            while batch.status not in ENDED:
                await asyncio.sleep(0.02)
                batch = await self.api.batches.retrieve(batch.id)
        return batch

    async def results(self, batch: openai.types.Batch) -> list[dict]:
        """In the order of the input."""
        found = []
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id:
                text = (await self.api.files.content(file_id)).text
                found += [json.loads(line) for line in text.splitlines()]
        return sorted(found, key=lambda line: int(line["custom_id"]))

    async def request(self, method: str, path: str, **options) -> httpx.Response:
        async with httpx.AsyncClient(headers=self.headers) as http:
            return await http.request(method, self.url + path, **options)


@asynccontextmanager
async def served(tmp_path, orchestrator=None, limits=None, native_url=None, **config):
    store = opened(tmp_path, FakeTime(), **(limits or {}))
    orchestrator = orchestrator or FakeOrchestrator(n_more=3)
    async with listening(app_with(orchestrator, store, native_url=native_url, **config)) as address:
        yield address


def refused(error: pytest.ExceptionInfo, status: int, code: str, param: str | None = None) -> bool:
    value = error.value
    return (value.status_code, value.code, value.param) == (status, code, param)


async def test_texts_are_spoken_as_flex_and_take_no_session(tmp_path):
    orchestrator = FakeOrchestrator(n_more=3)
    async with served(tmp_path, orchestrator) as address:
        client = Client(address)
        bodies = [SPEECH, SPEECH | {"response_format": "flac"}, SPEECH | {"input": ""}]
        bodies += [SPEECH | {"stream_format": "sse"}]
        batch = await client.create(SPEAK, bodies, metadata={"night": "1"})
        assert batch.status == "validating" and batch.metadata == {"night": "1"}
        batch = await client.ended(batch)
        assert (batch.status, batch.model) == ("completed", MODEL)
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (4, 2, 2)
        pcm, flac, empty, streamed = [line["response"] for line in await client.results(batch)]
        assert pcm["body"]["format"] == "pcm" and pcm["status_code"] == 200
        assert len(base64.b64decode(pcm["body"]["audio"])) == 0.4 * 2 * OUTPUT_RATE_HZ
        samples, _ = sf.read(io.BytesIO(base64.b64decode(flac["body"]["audio"])))
        assert len(samples) == 0.4 * OUTPUT_RATE_HZ
        assert empty["status_code"] == 400 and empty["body"]["error"]["param"] == "input"
        assert streamed["body"]["error"]["code"] == "unsupported_parameter"
        assert all(turn.flex for session in orchestrator.sessions for turn in session.turns)
        assert [session.admitted for session in orchestrator.sessions] == [False, False]


async def test_recordings_are_transcribed(tmp_path):
    file = io.BytesIO()
    sf.write(file, np.frombuffer(voice(1000), "<i2"), OUTPUT_RATE_HZ, format="WAV")
    sound = base64.b64encode(file.getvalue()).decode()
    orchestrator = FakeOrchestrator(n_more=3)
    async with served(tmp_path, orchestrator) as address:
        client = Client(address)
        bodies = [
            {"file": sound, "model": MODEL, "temperature": 0.5, "language": "en"},
            {"file": sound, "response_format": "text", "prompt": None},
            {"file": "no base64!"},
            {"file": sound, "speed\r\nx": "1"},
            {"file": sound, "include": ["logprobs"]},
            {"file": sound, "stream": True},
            {},
        ]
        batch = await client.ended(await client.create(TRANSCRIBE, bodies))
        results = [line["response"] for line in await client.results(batch)]
        assert results[0]["body"]["text"] == "All right." and results[0]["body"]["usage"]
        assert results[1]["body"] == "All right.\n"
        errors = [line["body"]["error"] for line in results[2:]]
        assert [error["param"] for error in errors] == [
            *("file", "speed\r\nx", "include", "stream", "file"),
        ]
        temperatures = {turn.temperature for s in orchestrator.sessions for turn in s.turns}
        assert temperatures == {0.5, 0.0}


async def test_chats_and_completions_reach_their_engines_with_the_names_of_the_key(tmp_path):
    sglang = FakeSglang()
    async with (
        listening(sglang.app) as native,
        served(
            tmp_path,
            native_url=f"http://{native}",
            api_keys=("alice", "bob"),
            max_responses_per_minute=1,
        ) as address,
    ):
        alice = Client(address, "alice")
        hi = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}], "n": 3}
        spoken = {**hi, "n": 1, "modalities": ["text", "audio"], "audio": {"format": "wav"}}
        batch = await alice.ended(await alice.create(CHAT, [hi, hi, spoken, hi | {"rid": "x"}]))
        results = [line["response"] for line in await alice.results(batch)]
        # The fake's status shows that its response is passed on; 200 alone is a success.
        assert [line["status_code"] for line in results] == [207, 207, 200, 400]
        assert results[2]["body"]["choices"][0]["message"]["audio"]["data"]
        assert results[0]["body"]["path"] == CHAT
        prompt = [{"model": MODEL, "prompt": "Once", "max_tokens": 3}]
        for key in ("alice", "bob"):
            client = Client(address, key)
            batch = await client.ended(await client.create(COMPLETIONS, prompt))
            [line] = await client.results(batch)
            assert line["response"]["body"]["path"] == COMPLETIONS
        salts = [json.loads(body)["cache_salt"] for _, _, body in sglang.requests]
        assert len(set(salts)) == 2 and salts[-1] != salts[-2]


async def test_two_keys_never_see_each_other(tmp_path):
    async with served(tmp_path, api_keys=("alice", "bob")) as address:
        alice, bob = Client(address, "alice"), Client(address, "bob")
        batch = await alice.ended(await alice.create(SPEAK, [SPEECH]))
        for file_id in (batch.input_file_id, batch.output_file_id):
            for call in (bob.api.files.retrieve, bob.api.files.content, bob.api.files.delete):
                with pytest.raises(openai.NotFoundError) as error:
                    await call(file_id)
                assert refused(error, 404, "file_not_found", "id")
        for call in (bob.api.batches.retrieve, bob.api.batches.cancel):
            with pytest.raises(openai.NotFoundError) as error:
                await call(batch.id)
            assert refused(error, 404, "batch_not_found", "id")
        with pytest.raises(openai.NotFoundError) as error:
            await bob.api.batches.create(
                input_file_id=batch.input_file_id, endpoint=SPEAK, completion_window="24h"
            )
        assert refused(error, 404, "file_not_found", "input_file_id")
        assert [b async for b in bob.api.batches.list()] == []
        assert [f async for f in bob.api.files.list()] == []
        assert len([f async for f in alice.api.files.list()]) == 2
        with pytest.raises(openai.AuthenticationError):
            await Client(address, "eve").api.files.list()


async def test_lists_are_read_page_by_page(tmp_path):
    async with served(tmp_path) as address:
        client = Client(address)
        files = [await client.upload(b"x") for _ in range(5)]
        ids = [file.id for file in files]
        assert [f.id async for f in client.api.files.list(limit=2)] == ids[::-1]
        assert [f.id async for f in client.api.files.list(limit=2, order="asc")] == ids
        assert [f async for f in client.api.files.list(purpose="batch_output")] == []
        batches = [await client.create(SPEAK, [SPEECH]) for _ in range(3)]
        listed = [b.id async for b in client.api.batches.list(limit=1)]
        assert listed == [b.id for b in batches[::-1]]
        for query in ("limit=0", "limit=x", "order=up", "after=../x", "size=3", "limit=99999"):
            answer = await client.request("GET", f"/files?{query}")
            assert answer.status_code == 400, query
            assert answer.json()["error"]["param"] == query.partition("=")[0]


async def test_files_are_described_read_and_deleted(tmp_path):
    async with served(tmp_path) as address:
        client = Client(address)
        data = bytes(range(256)) * 5000
        file = await client.api.files.create(
            file=("../../etc/passwd", data),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert (file.bytes, file.purpose, file.status) == (len(data), "batch", "processed")
        assert file.expires_at - file.created_at == 3600
        assert [path.name for path in (tmp_path / "files").iterdir()] == [file.id]
        assert (await client.api.files.content(file.id)).content == data
        assert (await client.api.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.api.files.retrieve(file.id)
        for wrong in ("..%2Flock", "%2e%2e", "file-x", "lock", "'; DROP TABLE files"):
            answer = await client.request("GET", f"/files/{wrong}")
            assert answer.status_code == 404, wrong


@pytest.mark.parametrize(
    ("data", "files", "param"),
    [
        ({"purpose": "batch"}, {}, "file"),
        ({}, {"file": b"x"}, "purpose"),
        ({"purpose": "assistants"}, {"file": b"x"}, "purpose"),
        ({"purpose": "batch", "more": "x"}, {"file": b"x"}, "more"),
        ({"purpose": "batch", "file": "text"}, {}, "file"),
        (
            {"purpose": "batch", "expires_after[anchor]": "now", "expires_after[seconds]": "4000"},
            {"file": b"x"},
            "expires_after.anchor",
        ),
        (
            {
                "purpose": "batch",
                "expires_after[anchor]": "created_at",
                "expires_after[seconds]": "10",
            },
            {"file": b"x"},
            "expires_after.seconds",
        ),
    ],
)
async def test_a_faulty_upload_is_refused_and_leaves_nothing(tmp_path, data, files, param):
    async with served(tmp_path) as address:
        client = Client(address)
        # A part with a file's name makes it multipart also without a file.
        parts = [(name, (None, value)) for name, value in data.items()]
        parts += [(name, ("x.jsonl", value)) for name, value in files.items()]
        answer = await client.request("POST", "/files", files=parts)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param
        assert list((tmp_path / "files").iterdir()) == []


async def test_a_file_that_is_too_large_is_refused(tmp_path):
    async with served(tmp_path, limits={"max_file_bytes": 1000}) as address:
        client = Client(address)
        await client.upload(b"x" * 1000)
        with pytest.raises(openai.APIStatusError) as error:
            await client.upload(b"x" * 200_000)
        assert refused(error, 413, "request_too_large")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"endpoint": COMPLETIONS}, "endpoint"),  # this server has no SGLang of its own
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"input_file_id": None}, "input_file_id"),
        ({"output_expires_after": {"anchor": "x", "seconds": 4000}}, "output_expires_after.anchor"),
        ({"more": 1}, "more"),
    ],
)
async def test_a_faulty_batch_is_refused(tmp_path, change, param):
    async with served(tmp_path) as address:
        client = Client(address)
        file = await client.upload(input_of(["a"]))
        body = {"input_file_id": file.id, "endpoint": SPEAK, "completion_window": "24h"} | change
        answer = await client.request("POST", "/batches", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
        assert [b async for b in client.api.batches.list()] == []


async def test_a_faulty_input_fails_its_batch_with_the_numbers_of_the_lines(tmp_path):
    async with served(tmp_path) as address:
        client = Client(address)
        file = await client.upload(b"{\n" + input_of(["a", "a"], url=SPEAK))
        batch = await client.ended(
            await client.api.batches.create(
                input_file_id=file.id, endpoint=SPEAK, completion_window="24h"
            )
        )
        assert batch.status == "failed" and batch.failed_at
        faults = [(fault.line, fault.code) for fault in batch.errors.data]
        assert faults == [(1, "invalid_json_line"), (3, "duplicate_custom_id")]
        assert await client.results(batch) == []


async def test_a_file_in_use_is_kept_and_a_batch_is_cancelled(tmp_path):
    orchestrator = FakeOrchestrator(n_more=0)  # nothing runs
    async with served(tmp_path, orchestrator) as address:
        client = Client(address)
        batch = await client.create(SPEAK, [SPEECH] * 3)
        with pytest.raises(openai.ConflictError) as error:
            await client.api.files.delete(batch.input_file_id)
        assert refused(error, 409, "file_in_use")
        assert (await client.api.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
        batch = await client.ended(batch)
        assert batch.status == "cancelled" and batch.cancelled_at >= batch.cancelling_at
        codes = {line["error"]["code"] for line in await client.results(batch)}
        assert codes <= {"batch_cancelled"}
        await client.api.files.delete(batch.input_file_id)
        with pytest.raises(openai.ConflictError) as error:
            await client.api.batches.cancel(batch.id)
        assert refused(error, 409, "batch_ended")


async def test_a_line_may_refer_to_a_spoken_answer():
    answers, orchestrator = SpokenAnswers(), FakeOrchestrator()
    answers.keep("audio_1", "Hello Emma.")
    parts = services(orchestrator)
    parts.answers = answers
    endpoints = line_endpoints(parts, FlexGate(FlexConfig()))
    messages = history(with_id(ANSWERS["spoken, by id"], "audio_1"))
    body = json.dumps(SPOKEN | {"messages": messages}).encode()
    outcome = await InProcess(endpoints)("", CHAT, body, until_s=1 << 40)
    assert outcome.succeeded, outcome
    assert orchestrator.turns[0].history[1].parts[0].text == "Hello Emma."


@pytest.mark.parametrize(("disposition", "name"), NAMES)
async def test_an_upload_may_have_an_extended_name(disposition, name, tmp_path):
    async with served(tmp_path) as address:
        form = form_of(disposition, b"{}\n", {"purpose": "batch"})
        response = await Client(address).request("POST", "/files", **form)
        assert response.json()["filename"] == name


def test_null_is_an_absent_value_in_every_form():
    fields = list(optional_fields(inspect.type_info(BatchForm), set()))
    assert len(fields) == 2 and all(may_be_null for _, _, may_be_null in fields)


async def test_a_full_server_is_waited_for(tmp_path):
    orchestrator = FakeOrchestrator(n_more=3)
    orchestrator.refuse_with = CapacityError("full", retry_after_s=1)
    async with served(tmp_path, orchestrator, limits={"retry_s": 0.01}) as address:
        client = Client(address)
        batch = await client.create(SPEAK, [SPEECH])
        await asyncio.sleep(0.2)
        assert (await client.api.batches.retrieve(batch.id)).status != "completed"
        orchestrator.refuse_with = None
        batch = await client.ended(batch)
        assert batch.request_counts.completed == 1


async def test_a_server_that_only_speaks_has_batches_of_speech_alone(tmp_path):
    async with served(tmp_path, has_language_model=False) as address:
        client = Client(address)
        for url in (CHAT, COMPLETIONS, TRANSCRIBE):
            with pytest.raises(openai.BadRequestError, match=SPEAK) as error:
                await client.create(url, [{}])
            assert error.value.param == "endpoint"
        batch = await client.ended(await client.create(SPEAK, [SPEECH]))
        assert batch.request_counts.completed == 1


async def test_without_a_folder_the_error_names_the_flag():
    off = app_of(FakeOrchestrator(), additions=[NoBatches().gateway], api_keys=("k",))
    async with listening(off) as address:
        client = Client(address, "k")
        calls = [
            client.api.files.list(),
            client.api.batches.list(),
            client.upload(b"x"),
            client.api.batches.cancel("batch_x"),
        ]
        for call in calls:
            with pytest.raises(openai.NotFoundError, match="--batch-dir") as error:
                await call
            assert error.value.code == "batches_off"
        with pytest.raises(openai.AuthenticationError):
            await Client(address, "x").api.files.list()


async def test_a_server_goes_on_where_the_one_before_was_stopped(tmp_path):
    gate = asyncio.Event()
    slow = FakeOrchestrator(n_more=3, scripts=[[gate]])
    async with served(tmp_path, slow) as address:
        client = Client(address)
        batch = await client.create(SPEAK, [SPEECH] * 3)
        async with asyncio.timeout(_PATIENCE_S):
            while (await client.api.batches.retrieve(batch.id)).request_counts.completed < 2:
                await asyncio.sleep(0.02)
    store = Store(tmp_path)
    async with listening(app_with(FakeOrchestrator(n_more=3), store)) as address:
        client = Client(address)
        batch = await client.ended(await client.api.batches.retrieve(batch.id))
        assert batch.request_counts.completed == 3
        assert [line["custom_id"] for line in await client.results(batch)] == ["0", "1", "2"]
