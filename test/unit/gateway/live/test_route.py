"""Claims about /v1/live/sessions on a real socket: its handshakes, and what is not served."""

import json

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from test.protocol.live import LiveEvents
from test.unit.gateway.fakes import FakeOrchestrator, app_of
from test.unit.gateway.live_server import listening

PATH = "/v1/live/sessions"
START = json.dumps({"type": "session.start", "session": {"model": "gpt-live-1"}})


def key(value: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {value}"}


async def test_a_session_from_the_start_to_the_close():
    orchestrator, seen = FakeOrchestrator(), LiveEvents()
    async with (
        listening(app_of(orchestrator, api_keys=("secret",))) as address,
        connect(f"ws://{address}{PATH}", additional_headers=key("secret")) as socket,
    ):
        await socket.send(START)
        kinds = []
        for _ in range(5):
            event = json.loads(await socket.recv())
            seen.see(event)
            kinds.append(event["type"])
        assert kinds == ["session.started", *["session.output_audio.delta"] * 4]
        await socket.send('{"type": "session.close"}')
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                event = json.loads(await socket.recv())
                seen.see(event)
        assert event["type"] == "session.closed"
        assert closed.value.rcvd.code == 1000
    assert orchestrator.session.session_id.startswith("live_")


async def test_keys_are_checked_in_headers_and_subprotocols():
    async with listening(app_of(FakeOrchestrator(), api_keys=("secret",))) as address:
        for headers in ({}, key("wrong")):
            with pytest.raises(InvalidStatus) as refused:
                async with connect(f"ws://{address}{PATH}", additional_headers=headers):
                    pass
            assert refused.value.response.status_code == 401
        offered = ["realtime", "openai-insecure-api-key.secret"]
        async with connect(f"ws://{address}{PATH}", subprotocols=offered) as socket:
            assert socket.subprotocol == "realtime"


async def test_parameters_of_the_url_are_refused():
    async with (
        listening(app_of(FakeOrchestrator())) as address,
        connect(f"ws://{address}{PATH}?model=gpt-live-1") as socket,
    ):
        assert await refusal(socket) == ("unknown_parameter", 1008)


async def refusal(socket) -> tuple[str, int]:
    """Codes of the error and of the close."""
    event = json.loads(await socket.recv())
    LiveEvents().see(event)
    with pytest.raises(ConnectionClosed) as closed:
        await socket.recv()
    return event["error"]["code"], closed.value.rcvd.code


async def test_sessions_of_both_protocols_count_together():
    app = app_of(FakeOrchestrator(), max_sessions_per_key=1)
    async with (
        listening(app) as address,
        connect(f"ws://{address}/v1/realtime"),
        connect(f"ws://{address}{PATH}") as socket,
    ):
        assert await refusal(socket) == ("rate_limit_exceeded", 1013)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", PATH, 426, "upgrade_required"),
        ("HEAD", PATH, 426, None),
        ("DELETE", PATH, 405, "method_not_supported"),
        ("POST", f"{PATH}/live_1/accept", 404, "unknown_url"),
        ("POST", f"{PATH}/live_1/fork", 404, "unknown_url"),
        ("POST", f"{PATH}/live_1/hangup", 404, "session_not_found"),
        ("GET", f"{PATH}/live_1/content", 404, "unknown_url"),
    ],
)
async def test_what_is_not_served_has_the_apis_form(method, path, status, code):
    async with listening(app_of(FakeOrchestrator())) as address, httpx.AsyncClient() as client:
        response = await client.request(method, f"http://{address}{path}")
        assert response.status_code == status
        assert code is None or response.json()["error"]["code"] == code


async def started(socket) -> str:
    """The id of a session on its own socket."""
    await socket.send(START)
    return json.loads(await socket.recv())["session"]["id"]


async def status_of(url: str, **options) -> tuple[int, str]:
    with pytest.raises(InvalidStatus) as refused:
        async with connect(url, **options):
            pass
    response = refused.value.response
    return response.status_code, json.loads(response.body)["error"]["code"]


async def test_a_sideband_needs_a_session_of_its_own_key():
    async with (
        listening(app_of(FakeOrchestrator(), api_keys=("one", "two"))) as address,
        connect(f"ws://{address}{PATH}", additional_headers=key("one")) as socket,
    ):
        url = f"ws://{address}{PATH}/{await started(socket)}"
        own = {"additional_headers": key("one")}
        assert await status_of(f"{url}/fork", **own) == (404, "unknown_url")
        assert await status_of(f"{url}x/attach", **own) == (404, "session_not_found")
        foreign = await status_of(f"{url}/attach", additional_headers=key("two"))
        assert foreign == (404, "session_not_found")
        assert (await status_of(f"{url}/attach"))[0] == 401
        assert await status_of(f"{url}/attach?model=x", **own) == (400, "unknown_parameter")
        assert await status_of(f"{url}/attach?graceful_close=1", **own) == (400, "invalid_value")
        async with connect(f"{url}/attach?graceful_close=true", **own) as aside:
            seen = LiveEvents(is_sideband=True)
            await socket.send('{"type": "session.close"}')
            with pytest.raises(ConnectionClosed) as closed:
                while True:
                    event = json.loads(await aside.recv())
                    seen.see(event)
            assert event["type"] == "session.closed"
            assert closed.value.rcvd.code == 1000
        assert await status_of(f"{url}/attach", **own) == (404, "session_not_found")
