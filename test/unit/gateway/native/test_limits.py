"""What a model's chat template has a place for decides what a request may hold."""

import json

import httpx
import pytest

from sglang_live.gateway.app import build_app
from sglang_live.gateway.http.health import Health
from sglang_live.gateway.native.limits import NativeLimits, found_in_templates
from test.unit.gateway.fakes import FakeOrchestrator, LoudnessModel, config_of

HI = {"role": "user", "content": "Hi."}


@pytest.mark.parametrize(
    ("template", "reads"),
    [
        ("{{ messages }}", set()),
        ("{% if enable_thinking %}{{ thoughts }}{% endif %}", {"enable_thinking"}),
        ("{{ reasoning_effort or thinking }}", {"reasoning_effort", "thinking"}),
    ],
)
def test_a_template_reads_the_settings_that_it_names(tmp_path, template, reads):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    found = found_in_templates(tmp_path)
    assert found == {"takes_images": False, "template_reads": reads}


async def test_settings_that_the_template_does_not_read_are_refused():
    app = build_app(
        FakeOrchestrator(),
        config=config_of(),
        native_url="http://native",
        health=lambda: Health({}),
        speech_model=LoudnessModel(),
        native_limits=NativeLimits(template_reads=frozenset()),
    )
    settings = {
        "reasoning_effort": "high",
        "chat_template_kwargs.thinking": True,
        "chat_template_kwargs.enable_thinking": True,
    }
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        for path, value in settings.items():
            holder, _, name = path.partition(".")
            body = {"messages": [HI], holder: {name: value} if name else value}
            response = await http.post("/v1/chat/completions", json=body)
            error = response.json()["error"]
            assert (error["code"], error["param"]) == ("unsupported_parameter", path)
