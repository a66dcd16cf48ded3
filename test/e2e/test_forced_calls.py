"""Function calls that have to be made end, over every route, and fit their parameters."""

import json

import pytest
from openai import AsyncOpenAI

from test.e2e.conftest import Server
from test.e2e.forced_calls import CHOICES, ROUTES, case_of, run

pytestmark = [pytest.mark.e2e]

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]


def seeds() -> list[int]:
    """One case of each choice on each route."""
    found: dict[tuple[str, str], int] = {}
    for seed in range(200):
        case = case_of(seed)
        found.setdefault((case.choice, case.route), seed)
    assert len(found) == len(CHOICES) * len(set(ROUTES))
    return sorted(found.values())


async def test_every_response_ends_and_every_call_fits(server: Server):
    counts, faults = await run(server.http, seeds(), at_once=3)
    assert faults == []
    assert counts.total() == 12


@pytest.mark.parametrize("audio", [False, True], ids=["text", "audio"])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["any", "named"])
async def test_openais_client_gets_a_forced_call(server: Server, audio, choice):
    more = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "pcm16"}}
    body = {"model": "demo", "messages": ASKED, "tools": [TOOL], "tool_choice": choice}
    async with AsyncOpenAI(base_url=f"{server.http}/v1", api_key="-") as client:
        whole = await client.chat.completions.create(**body, **(more if audio else {}))
        assert whole.choices[0].finish_reason == "tool_calls"
        for call in whole.choices[0].message.tool_calls:
            assert json.loads(call.function.arguments).keys() == {"city"}
        arguments: dict[int, str] = {}
        streamed = await client.chat.completions.create(
            **body, **(more if audio else {}), stream=True
        )
        async for chunk in streamed:
            for call in chunk.choices[0].delta.tool_calls or ():
                known = arguments.setdefault(call.index, "")
                arguments[call.index] = known + (call.function.arguments or "")
        assert arguments and all(json.loads(one).keys() == {"city"} for one in arguments.values())
