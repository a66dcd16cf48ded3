"""A server without keys accepts this machine only, not websites in a browser of this machine."""

import httpx
import pytest
from starlette.testclient import TestClient, WebSocketDenialResponse

from .fakes import FakeOrchestrator, app_of

OWN = ("127.0.0.1:30000", "localhost:30000", "[::1]:30000", "localhost", "127.0.0.2")
PAGES = ("http://127.0.0.1:30000", "http://localhost:5173", "https://localhost", "http://[::1]:1")
FOREIGN_HOSTS = ("evil.example:30000", "10.0.0.7", "localhost.evil.example", "[broken", "")
FOREIGN_PAGES = (
    "https://evil.example", "http://127.0.0.1.evil.example", "null", "file://", "http://10.0.0.7"
)  # fmt: skip


def app(**config):
    return app_of(FakeOrchestrator(), **{"allow_anonymous": False, **config})


async def status(path: str = "/v1/models", *, built=None, **headers: str) -> int:
    transport = httpx.ASGITransport(built or app())
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:30000") as http:
        return (await http.get(path, headers=headers)).status_code


async def test_programs_and_pages_of_this_machine_are_accepted():
    for host in OWN:
        assert await status(host=host) == 200, host
        for page in PAGES:
            assert await status(host=host, origin=page) == 200, page
    assert await status("/") == await status("/health") == await status("/metrics") == 200


async def test_foreign_pages_are_refused():
    built = app()
    for page in FOREIGN_PAGES:
        assert await status(built=built, origin=page) == 403, page
    transport = httpx.ASGITransport(built)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        headers = {"origin": "https://evil.x"}
        response = await http.post("/v1/audio/speech", json={}, headers=headers)
        assert response.json()["error"]["code"] == "foreign_page"
        counted = (await http.get("/metrics")).text
    assert 'gateway_errors_total{code="foreign_page"} 6.0' in counted


async def test_a_website_whose_name_resolves_to_this_machine_is_refused():
    for host in FOREIGN_HOSTS:
        assert await status(host=host) == 403, host


def first_event(built, **headers: str) -> str:
    """Type of the first event of a session."""
    with (
        TestClient(built) as client,
        client.websocket_connect("ws://127.0.0.1:30000/v1/realtime", headers=headers) as socket,
    ):
        return socket.receive_json()["type"]


@pytest.mark.parametrize("headers", [{"origin": FOREIGN_PAGES[0]}, {"host": FOREIGN_HOSTS[0]}])
def test_foreign_sockets_are_refused(headers):
    with pytest.raises(WebSocketDenialResponse) as refused:
        first_event(app(), **headers)
    assert refused.value.status_code == 403


def test_sockets_of_this_machine_are_accepted():
    assert first_event(app()) == first_event(app(), origin=PAGES[0]) == "session.created"


async def test_with_keys_or_anonymous_access_every_page_is_accepted():
    with_key = app(api_keys=("k",))
    headers = {"origin": FOREIGN_PAGES[0], "host": FOREIGN_HOSTS[0], "authorization": "Bearer k"}
    assert await status(built=with_key, **headers) == 200
    assert await status(built=app(allow_anonymous=True), **headers) == 200
