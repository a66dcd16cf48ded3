"""The plain HTTP routes of the gateway."""

import httpx
import pytest

from sglang_live.errors import BadInputError
from sglang_live.gateway.config import GatewayConfig
from sglang_live.interaction.vad import VadSettings
from test.unit.gateway.fakes import MODEL, FakeOrchestrator, app_of, config_of


def client(stages=None, **config) -> httpx.AsyncClient:
    app = app_of(FakeOrchestrator(), stages=stages, **config)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


@pytest.mark.parametrize(
    ("stages", "status"),
    [
        ({"thinker": "serving", "talker": "serving"}, 200),
        ({"thinker": "serving", "talker": "starting"}, 503),
        ({"thinker": "serving", "talker": "dead"}, 503),
        ({"thinker/0": "dead", "thinker/1": "serving", "talker/0": "serving"}, 200),
        ({"thinker/0": "dead", "thinker/1": "starting", "talker/0": "serving"}, 503),
        ({}, 503),
    ],
)
async def test_health_is_ok_only_when_every_stage_serves(stages, status):
    response = await client(stages).get("/health")
    assert response.status_code == status
    assert response.json()["stages"] == stages


async def test_models_lists_the_served_model_and_the_error_for_another_names_it():
    http = client()
    assert [model["id"] for model in (await http.get("/v1/models")).json()["data"]] == [MODEL]
    assert (await http.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
    missing = await http.get("/v1/models/gpt-5")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"
    assert MODEL in missing.json()["error"]["message"]


async def test_capacity_reports_room_for_sessions_and_the_reason_of_its_limit():
    assert (await client().get("/v1/capacity")).json() == {
        "object": "capacity",
        "sessions": {"open": 1, "limit": 4, "more": 0},
        "reason": "full soon",
        "budget_share": 0.5,
        "kv": {
            "thinker": {"share": 0.25, "saturates_in_s": None},
            "talker": {"share": 0.5, "saturates_in_s": 12.346},
        },
    }
    assert (await client(api_keys=("k",)).get("/v1/capacity")).status_code == 401


async def test_keys_guard_the_api_and_its_metrics_but_not_health_and_the_page():
    http = client(api_keys=("k",))
    assert (await http.get("/v1/models")).status_code == 401
    assert (
        await http.get("/v1/models", headers={"Authorization": "Bearer wrong"})
    ).status_code == 401
    assert (await http.get("/v1/models", headers={"Authorization": "Bearer k"})).status_code == 200
    assert (await http.get("/metrics")).status_code == 401
    assert (await http.get("/metrics", headers={"Authorization": "Bearer k"})).status_code == 200
    for open_route in ("/", "/health"):
        assert (await http.get(open_route)).status_code == 200


async def test_metrics_and_the_page_are_served():
    http = client()
    assert "sglang_live_gateway_sessions_open 0.0" in (await http.get("/metrics")).text
    page = await http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "/v1/realtime" in page.text


async def test_native_routes_are_absent_without_a_native_server():
    assert (await client().post("/generate", json={})).status_code == 404


@pytest.mark.parametrize(
    "wrong",
    [
        {"api_keys": ("",)},
        {"api_keys": (" k",)},
        {"max_append_bytes": 0},
        {"max_frame_bytes": 100, "max_append_bytes": 100},
        {"send_buffer_bytes": -1},
    ],
)
def test_invalid_settings_are_refused(wrong):
    with pytest.raises(BadInputError):
        config_of(**wrong)


def test_default_settings_are_valid_and_frozen():
    config = GatewayConfig()
    assert config.turns.vad == VadSettings()
    with pytest.raises(AttributeError):
        config.keys.api_keys = ("x",)
