"""Claims about service tiers: over HTTP, with keys for batches alone, and towards SGLang."""

import asyncio
import json

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse

from sglang_live.gateway.flex.gate import FlexConfig
from sglang_live.gateway.native.request_check import OF_USE_UNTIL
from test.unit.gateway.fakes import MODEL, FakeOrchestrator, app_of
from test.unit.gateway.http.test_transcription import file_of, writes
from test.unit.gateway.live_server import listening
from test.unit.gateway.native.test_proxy import FakeSglang, proxied

CHAT, SPEECH, COMPLETIONS = "/v1/chat/completions", "/v1/audio/speech", "/v1/completions"
TRANSCRIPTIONS = "/v1/audio/transcriptions"
HI = {"role": "user", "content": "Hi."}
SPOKEN = {"messages": [HI], "modalities": ["text", "audio"], "audio": {"format": "pcm16"}}
FLEX_HEADER = {"X-Service-Tier": "flex"}
SPEAK = {"input": "Hi."}


def http_of(orchestrator: FakeOrchestrator, **config) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app_of(orchestrator, **config))
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")


def events_of(response: httpx.Response) -> list[dict]:
    lines = response.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize(
    ("in_body", "headers", "served"),
    [
        ({"service_tier": "flex"}, {}, "flex"),
        ({}, FLEX_HEADER, "flex"),
        ({"service_tier": "default"}, FLEX_HEADER, "flex"),
        ({"service_tier": "auto"}, {}, "default"),
        ({"service_tier": "priority"}, {}, "default"),
        ({}, {}, None),
    ],
)
@pytest.mark.parametrize("path", [CHAT, SPEECH])
async def test_the_response_says_which_tier_it_had(path, in_body, headers, served):
    orchestrator = FakeOrchestrator()
    async with http_of(orchestrator) as http:
        body = (SPOKEN if path == CHAT else SPEAK) | in_body
        response = await http.post(path, json=body, headers=headers)
        assert response.status_code == 200
        assert response.headers.get("x-service-tier") == served
        if path == CHAT:
            assert response.json().get("service_tier") == served
            streamed = await http.post(path, json=body | {"stream": True}, headers=headers)
            assert {event.get("service_tier") for event in events_of(streamed)} == {served}
    [turn] = orchestrator.turns
    assert turn.flex is (served == "flex")
    assert orchestrator.session.admitted is not turn.flex, "admission counts no flex request"


async def test_transcriptions_have_tiers():
    orchestrator = writes("x")
    async with http_of(orchestrator) as http:
        files = {"file": ("said.wav", file_of())}
        response = await http.post(TRANSCRIPTIONS, data={"service_tier": "flex"}, files=files)
        assert response.headers["x-service-tier"] == "flex"
        [turn] = orchestrator.turns
        assert turn.flex and turn.transcribes and not orchestrator.session.admitted
        response = await http.post(TRANSCRIPTIONS, data={"service_tier": "fast"}, files=files)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "service_tier"


@pytest.mark.parametrize("path", [CHAT, SPEECH, COMPLETIONS, "/generate"])
async def test_a_tier_that_does_not_exist_is_an_error(path):
    body = {CHAT: SPOKEN, SPEECH: SPEAK, COMPLETIONS: {"prompt": "x"}}.get(path, {"text": "x"})
    async with proxied() as (http, sglang):
        response = await http.post(path, json=body, headers={"X-Service-Tier": "fast"})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "X-Service-Tier"
        for field in {"service_tier": "fast"}, {"priority": 1}, {"priority": "low"}:
            response = await http.post(path, json=body | field)
            assert response.status_code == 400, field
            assert response.json()["error"]["param"] in field
        assert sglang.requests == []


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, {"prompt": "x"}), (CHAT, {"model": MODEL, "messages": [HI]})],
)
async def test_sglang_gets_flex_requests_under_names_of_their_own(path, body):
    async with proxied() as (http, sglang):
        marks = {"service_tier": "flex"}, {"priority": -5}
        for mark in marks:
            response = await http.post(path, json=body | mark)
            assert response.headers["x-service-tier"] == "flex"
        assert (await http.post(path, json=body, headers=FLEX_HEADER)).status_code == 207
        await http.post(path, json=body | {"service_tier": "default", "priority": 0})
        await http.post(path, json=body | {"rid": "batch-forged"})
        *flex, ordinary, forged = [json.loads(raw) for _, _, raw in sglang.requests]
        for sent in flex:
            assert sent["rid"].startswith("batch-native-") and sent["priority"] == -1
            assert "service_tier" not in sent
        for sent in ordinary, forged:
            assert sent["rid"].startswith("native-")
            assert not {"service_tier", "priority"} & set(sent)


async def test_sglang_gets_a_line_of_a_batch_with_the_time_at_which_that_expires():
    sglang = FakeSglang()
    async with listening(sglang.app) as upstream:
        app = app_of(FakeOrchestrator(), native_url=f"http://{upstream}")

        async def line(scope, receive, send):
            await app(scope | {OF_USE_UNTIL: 1_764_201_600}, receive, send)

        transport = httpx.ASGITransport(line)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            await http.post(COMPLETIONS, json={"prompt": "x"}, headers=FLEX_HEADER)
            await http.post(COMPLETIONS, json={"prompt": "x"})
        flex, ordinary = [json.loads(raw)["rid"] for _, _, raw in sglang.requests]
    assert flex.startswith("batch-by1764201600-native-") and ordinary.startswith("native-")


class SpeakingSglang(FakeSglang):
    """Responds as SGLang does to a completion."""

    async def echo(self, request: Request):
        body = json.loads(await request.body())
        if not body.get("stream"):
            return JSONResponse({"id": "c", "choices": []})

        async def events():
            yield b'data: {"id":"c","choi'
            yield b'ces":[]}\n\ndata: [DONE]\n\n'

        return StreamingResponse(events(), media_type="text/event-stream")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tier", ["flex", "auto", None])
async def test_written_responses_name_their_tier(tier, stream):
    async with (
        listening(SpeakingSglang().app) as upstream,
        listening(app_of(FakeOrchestrator(), native_url=f"http://{upstream}")) as address,
        httpx.AsyncClient(base_url=f"http://{address}") as http,
    ):
        body = {"prompt": "x", "stream": stream, "service_tier": tier}
        response = await http.post(COMPLETIONS, json=body)
    found = events_of(response) if stream else [response.json()]
    served = {"flex": "flex", "auto": "default", None: None}[tier]
    assert [one.get("service_tier") for one in found] == [served]


async def test_a_flex_request_that_hangs_up_is_aborted_by_its_name():
    async with proxied() as (http, sglang):
        send = http.post("/generate", json={"text": "x", "rid": "mine", "priority": -1})
        sending = asyncio.create_task(send)
        await sglang.working.wait()
        sending.cancel()
        async with asyncio.timeout(30):
            while not sglang.requests:
                await asyncio.sleep(0.01)
        [(path, _, raw)] = sglang.requests
        assert path == "/abort_request"
        assert json.loads(raw)["rid"].startswith("batch-native-")


async def test_a_client_aborts_its_flex_request_by_the_name_that_it_gave():
    async with proxied() as (http, sglang):
        body = {"text": "x", "rid": "mine", "priority": -1}
        running = asyncio.create_task(http.post("/generate", json=body))
        await sglang.working.wait()
        await http.post("/abort_request", json={"rid": "mine"})
        name = json.loads(sglang.requests[-1][2])["rid"]
        assert name.startswith("batch-native-")
        await http.post("/abort_request", json={"rid": name})  # as copied from a response
        assert json.loads(sglang.requests[-1][2])["rid"] == name
        sglang.gate.set()
        await running
        await http.post("/abort_request", json={"rid": "mine"})
        assert json.loads(sglang.requests[-1][2])["rid"] == name.removeprefix("batch-")


async def test_flex_has_no_place_in_a_session():
    async with proxied() as (http, _):
        await http.post("/open_session", json={"capacity_of_str_len": 1, "session_id": "s"})
        body = {"text": "x", "session_params": {"id": "s"}, "priority": -1}
        response = await http.post("/generate", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "session_params"


async def test_more_flex_requests_than_may_wait_are_refused():
    flex = FlexConfig(at_once=1, waiting=0)
    async with proxied(flex=flex) as (http, sglang):
        body = {"text": "x", "priority": -1}
        running = asyncio.create_task(http.post("/generate", json=body))
        await sglang.working.wait()
        response = await http.post("/generate", json=body)
        assert response.status_code == 429 and int(response.headers["retry-after"]) > 0
        assert response.json()["error"]["code"] == "flex_busy"
        assert (await http.post(SPEECH, json=SPEAK | {"service_tier": "flex"})).status_code == 429
        assert (await http.post(SPEECH, json=SPEAK)).status_code == 200, "only flex is bounded"
        sglang.gate.set()
        assert (await running).status_code == 200
        assert (await http.post("/generate", json=body)).status_code == 200


async def test_a_flex_request_ends_when_its_time_is_over():
    async with proxied(flex=FlexConfig(run_s=0.05)) as (http, sglang):
        response = await http.post("/generate", json={"text": "x", "priority": -1})
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        async with asyncio.timeout(30):
            await sglang.hung_up.wait()


async def test_a_key_for_batches_alone_is_always_flex_and_opens_no_session():
    keys = dict(api_keys=("user",), batch_only_keys=("batches",))
    headers = {"Authorization": "Bearer batches"}
    async with proxied(**keys) as (http, sglang):
        response = await http.post(
            SPEECH, json=SPEAK | {"service_tier": "default"}, headers=headers
        )
        assert response.headers["x-service-tier"] == "flex"
        await http.post(COMPLETIONS, json={"prompt": "x"}, headers=headers)
        assert json.loads(sglang.requests[-1][2])["rid"].startswith("batch-")
        refused = [
            await http.post("/v1/realtime/client_secrets", json={}, headers=headers),
            await http.post("/open_session", json={"capacity_of_str_len": 1}, headers=headers),
        ]
        for response in refused:
            assert response.status_code == 403
            assert response.json()["error"]["code"] == "batch_only_key"
        other = await http.post(SPEECH, json=SPEAK, headers={"Authorization": "Bearer user"})
        assert "x-service-tier" not in other.headers
