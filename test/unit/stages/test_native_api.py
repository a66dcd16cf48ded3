import httpx
import pytest
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse

from sglang_live.gateway.native.routes import ROUTES
from sglang_live.stages.native_api import NATIVE_ROUTES, KeyGuard, restrict


def sglang_app() -> FastAPI:
    """With the routes that the proxy passes on, and two that it must never reach."""
    app = FastAPI()
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_credentials=True)
    for path in (*NATIVE_ROUTES, "/update_weights_from_disk", "/configure_logging"):
        app.add_api_route(path, lambda: PlainTextResponse("served"), methods=["GET", "POST"])
    return app


def client(app: FastAPI, key: str) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"}
    transport = httpx.ASGITransport(KeyGuard(app, "secret"))
    return httpx.AsyncClient(transport=transport, base_url="http://native", headers=headers)


def test_the_stage_serves_what_the_proxy_passes_on():
    assert set(ROUTES) == NATIVE_ROUTES


@pytest.mark.parametrize(
    "path", ["/update_weights_from_disk", "/configure_logging", "/docs", "/openapi.json"]
)
async def test_other_routes_of_sglang_are_gone(path):
    app = sglang_app()
    restrict(app)
    async with client(app, "secret") as http:
        assert (await http.post("/generate")).text == "served"
        assert (await http.post(path)).status_code == 404
        assert (await http.get(path)).status_code == 404


async def test_no_route_has_cors_headers():
    app = sglang_app()
    restrict(app)
    origin = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    async with client(app, "secret") as http:
        for answer in (
            await http.options("/generate", headers=origin),
            await http.post("/generate", headers=origin),
        ):
            assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("key", ["", "Secret", "secret2", "secre"])
async def test_without_the_key_every_route_answers_401(key):
    app = sglang_app()
    restrict(app)
    async with client(app, key) as http:
        assert (await http.post("/generate")).status_code == 401
        assert (await http.get("/nowhere")).status_code == 401


def test_a_route_that_sglang_lost_is_known_at_start():
    app = FastAPI()
    with pytest.raises(RuntimeError, match="/generate"):
        restrict(app)
