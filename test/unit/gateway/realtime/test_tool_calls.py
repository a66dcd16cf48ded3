"""Functions: how the model gets them, how its function calls are read, and malformed ones."""

import json

import pytest

from sglang_live.core import (
    AudioDelta,
    HistoryItem,
    TextPart,
    Tools,
    TranscriptDelta,
)
from sglang_live.gateway import tools as tools_module
from sglang_live.gateway.errors import ClientEventError
from sglang_live.gateway.tools import (
    FunctionCall,
    MalformedCallError,
    check_choice,
    check_tools,
    read_function_call,
    tools_of,
)
from test.unit.gateway.fakes import FakeOrchestrator, connected, done, services, spoken, tone, types

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Weather of a town.",
    "parameters": {
        "type": "object",
        "properties": {"town": {"type": "string"}},
        "required": ["town"],
    },
}
CALL = '{"name": "weather", "arguments": {"town": "Rome"}}'


# --- tools in the prompt ---


def test_tools_are_passed_in_the_form_of_the_chat_api():
    tools = tools_of((WEATHER,), "auto")
    [passed] = map(json.loads, tools.functions)
    assert passed == {key: WEATHER[key] for key in ("name", "description", "parameters")}
    assert tools.must_call is None


def test_tool_choice_decides_whether_a_function_must_be_called():
    assert tools_of((WEATHER,), "none") == tools_of((), "required") == Tools()
    assert tools_of((WEATHER,), "required").must_call == ""
    choice = {"type": "function", "name": "weather"}
    assert tools_of((WEATHER,), choice).must_call == "weather"


def test_a_bad_schema_and_an_unknown_function_are_refused():
    bad = {**WEATHER, "parameters": {"type": "objekt"}}
    with pytest.raises(ClientEventError) as refused:
        check_tools((WEATHER, bad), path="session.tools")
    assert refused.value.param == "session.tools[1].parameters"
    with pytest.raises(ClientEventError) as refused:
        choice = {"type": "function", "name": "time"}
        check_choice((WEATHER,), choice, path="response.tool_choice")
    assert refused.value.param == "response.tool_choice"


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        (5, "no object"),
        ({"$ref": "http://127.0.0.1:1/schema.json"}, "itself only"),
        ({"properties": {"town": {"allOf": [{"$ref": "file:///etc/hostname"}]}}}, "itself only"),
        ({"$dynamicRef": "other#town"}, "itself only"),
    ],
)
def test_a_schema_that_needs_others_is_refused(parameters, why):
    with pytest.raises(ClientEventError, match=why):
        check_tools(({**WEATHER, "parameters": parameters},), path="tools")


# --- what the model writes ---


def with_parameters(**parameters) -> tuple[dict, ...]:
    return ({"type": "function", "name": "weather", "parameters": parameters},)


def test_a_schema_may_refer_to_itself():
    tools = with_parameters(
        **{"$defs": {"town": {"type": "string"}}}, properties={"town": {"$ref": "#/$defs/town"}}
    )
    check_tools(tools, path="tools")
    assert read_function_call(CALL, tools).name == "weather"
    with pytest.raises(MalformedCallError, match="Arguments of weather"):
        read_function_call('{"name": "weather", "arguments": {"town": 5}}', tools)


@pytest.mark.parametrize("reference", ["#/$defs/nowhere", "#"])
def test_a_reference_that_leads_nowhere_makes_the_call_malformed(reference):
    tools = with_parameters(properties={"town": {"$ref": reference, "not": {"$ref": reference}}})
    with pytest.raises(MalformedCallError):
        read_function_call(CALL, tools)


@pytest.mark.parametrize(
    "town",
    [
        {"type": "string", "pattern": "^(o+)+$"},
        {"type": "object", "patternProperties": {"^(o+)+$": {}}, "additionalProperties": False},
    ],
)
def test_a_pattern_with_exponential_time_is_not_matched(town):
    tools = with_parameters(properties={"town": town, "pattern": {"type": "string"}})
    check_tools(tools, path="tools")
    long = "o" * 60 + "!"
    value = long if town["type"] == "string" else {long: 1}
    text = json.dumps({"name": "weather", "arguments": {"town": value}})
    assert read_function_call(text, tools).name == "weather"
    with pytest.raises(MalformedCallError):  # a property of that name is none
        read_function_call('{"name": "weather", "arguments": {"pattern": 5}}', tools)


def test_a_function_call_that_fits_its_schema_is_read():
    assert read_function_call(CALL, (WEATHER,)) == FunctionCall("weather", '{"town":"Rome"}')
    as_text = json.dumps({"name": "weather", "arguments": '{"town": "Rome"}'})
    assert read_function_call(as_text, (WEATHER,)).arguments == '{"town":"Rome"}'
    free = {"type": "function", "name": "stop"}
    assert read_function_call('{"name": "stop"}', (free,)) == FunctionCall("stop", "{}")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON"),
        ('{"name": "weather", "arguments": {"town": "Ro', "not JSON"),
        ("[]", "no name"),
        ('{"name": 7}', "no name"),
        ('{"name": "time", "arguments": {}}', "no function 'time'"),
        ('{"name": "weather", "arguments": {}}', r"weather: \$ does not fit 'required'"),
        ('{"name": "weather", "arguments": {"town": 7}}', r"weather: \$.town does not fit 'type'"),
        ('{"name": "weather", "arguments": [1]}', "not an object"),
        ('{"name": "weather", "arguments": "{"}', "not JSON"),
    ],
)
def test_a_malformed_function_call_is_recognised(text, why):
    with pytest.raises(MalformedCallError, match=why):
        read_function_call(text, (WEATHER,))


def test_a_function_call_nested_too_deeply_is_malformed():
    text = '{"name": "stop", "arguments": {"x": ' + "[" * 5000 + "]" * 5000 + "}}"
    with pytest.raises(MalformedCallError, match="not JSON"):
        read_function_call(text, ({"type": "function", "name": "stop"},))


# --- in a session ---


def generated(text: str) -> HistoryItem:
    parts = (TextPart(text),)
    return HistoryItem(key="reply", role="assistant", parts=parts, token_ids=(1, 2, 3, 4))


async def test_a_function_call_is_an_item_of_its_own_and_its_output_continues_the_conversation():
    called = [done(item=generated(""), function_calls=(CALL,))]
    orchestrator = FakeOrchestrator([called, spoken("It rains.")])
    async with connected(orchestrator) as client:
        client.update(tools=[WEATHER])
        await client.expect("session.updated")
        client.send("response.create")
        events = await client.until("response.done")
        assert types(events) == [
            "response.created",
            "response.output_item.added",
            "conversation.item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "conversation.item.done",
            "response.done",
        ]
        assert events[2]["item"]["arguments"] == ""
        [item] = events[-1]["response"]["output"]
        assert (item["type"], item["name"], item["status"]) == (
            "function_call",
            "weather",
            "completed",
        )
        assert json.loads(item["arguments"]) == {"town": "Rome"}
        assert len(item["call_id"]) <= 32
        output = {"type": "function_call_output", "call_id": item["call_id"], "output": "rain"}
        client.send("conversation.item.create", item=output)
        client.send("response.create")
        await client.until("response.done")
        asked = orchestrator.turns[-1]
        assert [(seen.role, seen.token_ids) for seen in asked.history] == [
            ("assistant", (1, 2, 3, 4)),
            ("tool", None),
        ]
        assert json.loads(asked.tools.functions[0])["name"] == "weather"


async def test_text_before_a_function_call_is_a_message_before_it():
    words = TranscriptDelta("One moment.", 2)
    steps = [words, done(item=generated("One moment."), function_calls=(CALL, CALL))]
    orchestrator = FakeOrchestrator([steps])
    async with connected(orchestrator) as client:
        client.update(output_modalities=["text"], tools=[WEATHER])
        client.send("response.create")
        events = await client.until("response.done")
        output = events[-1]["response"]["output"]
        assert [item["type"] for item in output] == ["message", "function_call", "function_call"]
        ended = [event for event in events if event["type"] == "response.output_item.done"]
        assert [event["output_index"] for event in ended] == [0, 1, 2]
        follows = [e for e in events if e["type"] == "conversation.item.done"]
        assert [e["previous_item_id"] for e in follows] == [None, output[0]["id"], output[1]["id"]]
        client.send("response.create")
        await client.until("response.done")
        # One history item, though three conversation items show it.
        assert [seen.token_ids for seen in orchestrator.turns[-1].history] == [(1, 2, 3, 4)]


async def test_a_function_call_outlives_the_truncation_of_the_text_before_it():
    """The user interrupted the text; the model must still see its function call."""
    orchestrator = FakeOrchestrator(
        [[TranscriptDelta("One moment.", 2), AudioDelta(tone(400)),
          done(item=generated("One moment."), function_calls=(CALL,), n_frames=5)]]
    )  # fmt: skip
    async with connected(orchestrator) as client:
        client.update(tools=[WEATHER])
        client.send("response.create")
        events = await client.until("response.done")
        message = events[-1]["response"]["output"][0]["id"]
        client.send("conversation.item.truncate", item_id=message, content_index=0, audio_end_ms=0)
        client.send("response.create")
        await client.until("response.done")
        [seen] = orchestrator.turns[-1].history
        assert "<tool_call>" in seen.parts[0].text and "Rome" in seen.parts[0].text


async def test_a_function_call_outlives_the_deletion_of_the_text_before_it():
    steps = [
        TranscriptDelta("One moment.", 2),
        done(item=generated("One."), function_calls=(CALL, CALL)),
    ]
    orchestrator = FakeOrchestrator([steps])
    async with connected(orchestrator) as client:
        client.update(output_modalities=["text"], tools=[WEATHER])
        client.send("response.create")
        events = await client.until("response.done")
        message = events[-1]["response"]["output"][0]["id"]
        client.send("conversation.item.delete", item_id=message)
        client.send("response.create")
        await client.until("response.done")
        texts = [seen.parts[0].text for seen in orchestrator.turns[-1].history]
        assert len(texts) == 2 and all("<tool_call>" in text for text in texts)


async def test_function_calls_leave_the_window_with_the_text_before_them():
    words = [
        TranscriptDelta("One moment.", 2),
        done(item=generated("One."), function_calls=(CALL,)),
    ]
    orchestrator = FakeOrchestrator([words, [done("Well.", gone=("reply",))]])
    async with connected(orchestrator) as client:
        client.update(output_modalities=["text"], tools=[WEATHER])
        client.send("response.create")
        events = await client.until("response.done")
        carried = [item["id"] for item in events[-1]["response"]["output"]]
        client.send("response.create")
        await client.until("response.done")
        left = [(await client.expect("conversation.item.deleted"))["item_id"] for _ in carried]
        assert left == carried
        client.send("response.create")
        await client.until("response.done")
        assert not any("<tool_call>" in str(seen.parts) for seen in orchestrator.turns[-1].history)


async def test_a_malformed_function_call_alone_is_the_text_of_a_response():
    orchestrator = FakeOrchestrator([[done(item=generated(""), function_calls=("{",))]])
    shared = services(orchestrator)
    async with connected(orchestrator, shared) as client:
        client.update(tools=[WEATHER])
        client.send("response.create")
        ended = (await client.find("response.done"))["response"]
        assert ended["status"] == "completed"
        [item] = ended["output"]
        assert item["content"][0]["transcript"] == "{"
    name = "sglang_live_gateway_tool_calls_total"
    count = shared.metrics.registry.get_sample_value(name, {"outcome": "malformed"})
    assert count == 1


async def test_a_function_call_that_is_cut_makes_an_incomplete_response():
    end = done("", status="incomplete", reason="max_output_tokens", function_calls=('{"name',))
    async with connected(FakeOrchestrator([[end]])) as client:
        client.update(tools=[WEATHER])
        client.send("response.create")
        ended = (await client.find("response.done"))["response"]
        assert ended["status"] == "incomplete"
        assert ended["status_details"]["reason"] == "max_output_tokens"
        assert all(item["type"] == "message" for item in ended["output"])


async def test_a_second_output_of_a_function_call_is_refused():
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "1"}
    async with connected(FakeOrchestrator()) as client:
        client.send("conversation.item.create", item=call)
        client.send("conversation.item.create", item=output | {"id": "first"})
        client.send("conversation.item.create", item=output, event_id="twice")
        error = (await client.find("error"))["error"]
        assert error["event_id"] == "twice" and error["code"] == "invalid_tool_call_id"
        client.send("conversation.item.delete", item_id="first")
        await client.find("conversation.item.deleted")
        client.send("conversation.item.create", item=output | {"id": "other"})
        assert (await client.find("conversation.item.added"))["item"]["id"] == "other"


async def test_text_beside_a_malformed_function_call_completes_the_response():
    steps = [TranscriptDelta("Hello.", 2), done(item=generated("Hello."), function_calls=("{",))]
    async with connected(FakeOrchestrator([steps])) as client:
        client.update(output_modalities=["text"], tools=[WEATHER])
        client.send("response.create")
        ended = (await client.find("response.done"))["response"]
        assert ended["status"] == "completed"
        assert [item["type"] for item in ended["output"]] == ["message"]


async def test_too_many_tools_are_one_error():
    async with connected(FakeOrchestrator()) as client:
        client.update(tools=[{**WEATHER, "description": "x" * 70_000}])
        error = (await client.expect("error"))["error"]
        assert (error["code"], error["param"]) == ("tools_too_large", "session.tools")


async def test_without_functions_a_choice_of_one_falls_back_to_auto():
    choice = {"type": "function", "name": "weather"}
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator) as client:
        client.update(tools=[WEATHER], tool_choice=choice)
        client.send("response.create", response={"tools": []})
        await client.until("response.done")
        assert orchestrator.turns[-1].tools == Tools()
        client.update(tools=[], instructions="Be kind.")
        session = (await client.find("session.updated"))["session"]
        assert (session["tool_choice"], session["instructions"]) == ("auto", "Be kind.")
        client.update(tools=[], tool_choice=choice)
        assert (await client.expect("error"))["error"]["param"] == "session.tool_choice"


async def test_tools_are_checked_when_they_are_given_and_not_again(monkeypatch):
    checked = []
    monkeypatch.setattr(tools_module, "check_schema", checked.append)
    async with connected(FakeOrchestrator()) as client:
        client.update(tools=[WEATHER])
        client.update(instructions="Be kind.")
        client.send("response.create", response={"instructions": "Be brief."})
        await client.until("response.done")
    assert checked == [WEATHER["parameters"]]


# --- what clients say of functions and calls ---


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([WEATHER, WEATHER], "[1].name"),
        ([{**WEATHER, "name": "a"}, WEATHER, {**WEATHER, "name": "a"}], "[2].name"),
        *(
            ([{**WEATHER, "name": name}], "[0].name")
            for name in ("", "a b", "a\nb", "caf\u00e9", "a.b", "x" * 65, None, 7)
        ),
        ([{**WEATHER, "strict": "yes"}], "[0].strict"),
        ([{**WEATHER, "returns": {}}], "[0].returns"),
    ],
)
@pytest.mark.parametrize("kind", ["session.update", "response.create"])
async def test_bad_functions_are_one_error_that_names_the_place(kind, tools, param):
    holder = kind.split(".")[0]
    fields = {"type": "realtime"} if holder == "session" else {}
    async with connected(FakeOrchestrator()) as client:
        client.send(kind, **{holder: {**fields, "tools": tools}})
        [error] = await client.settle()
        assert error["error"]["param"] == f"{holder}.tools{param}"


def call_item(**fields):
    return {
        "type": "function_call",
        "name": "weather",
        "call_id": "c1",
        "arguments": "{}",
        **fields,
    }


def output_of(call_id):
    return {"type": "function_call_output", "call_id": call_id, "output": "rain"}


@pytest.mark.parametrize("arguments", ["{", "no json", '{"a": NaN}', "[]", "7", '"x"', "{} {}"])
async def test_arguments_that_are_no_json_object_are_one_error(arguments):
    item = call_item(arguments=arguments)
    async with connected(FakeOrchestrator()) as client:
        client.send("conversation.item.create", item=item)
        assert (await client.expect("error"))["error"]["param"] == "item.arguments"
        client.send("response.create", response={"input": [item]})
        [error] = await client.settle()
        assert error["error"]["param"] == "response.input[0].arguments"


@pytest.mark.parametrize("arguments", ["", "null", "{}", '{"town": "Rome"}'])
async def test_a_function_call_without_arguments_is_valid(arguments):
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator) as client:
        client.send("conversation.item.create", item=call_item(arguments=arguments))
        client.send("response.create")
        await client.until("response.done")
        [seen] = orchestrator.turns[-1].history
        _, call, _ = seen.parts[0].text.split("\n")
        assert isinstance(json.loads(call)["arguments"], dict)


async def test_an_output_needs_a_function_call_before_it():
    async with connected(FakeOrchestrator()) as client:
        client.send("conversation.item.create", item=output_of("c1"), event_id="e")
        error = (await client.expect("error"))["error"]
        assert (error["code"], error["param"]) == ("invalid_tool_call_id", "item.call_id")
        assert error["event_id"] == "e"
        client.send("response.create", response={"input": [output_of("c1"), call_item()]})
        error = (await client.expect("error"))["error"]
        assert error["param"] == "response.input[0].call_id"
        # Neither left an item; the call and its output do, in this order.
        for item in (call_item(id="call"), output_of("c1")):
            client.send("conversation.item.create", item=item)
            await client.find("conversation.item.done")
        client.send("response.create", response={"input": [call_item(), output_of("c1")]})
        await client.until("response.done")


async def test_a_function_call_that_has_left_the_conversation_can_still_get_its_output():
    async with connected(FakeOrchestrator()) as client:
        client.send("conversation.item.create", item=call_item(id="call"))
        await client.find("conversation.item.done")
        client.send("conversation.item.delete", item_id="call")
        await client.find("conversation.item.deleted")
        client.send("conversation.item.create", item=output_of("c1"))
        await client.find("conversation.item.done")


async def test_a_function_call_of_an_out_of_band_response_can_get_its_output_in_the_conversation():
    orchestrator = FakeOrchestrator([[done(item=generated(""), function_calls=(CALL,))]])
    async with connected(orchestrator) as client:
        client.update(tools=[WEATHER])
        client.send("response.create", response={"conversation": "none"})
        [made] = (await client.find("response.done"))["response"]["output"]
        client.send("conversation.item.create", item=output_of(made["call_id"]))
        await client.find("conversation.item.done")


@pytest.mark.parametrize("at", ["session", "response"])
async def test_without_parallel_tool_calls_a_response_has_one_function_call(at):
    orchestrator = FakeOrchestrator([[done(item=generated(""), function_calls=(CALL, CALL))]])
    shared, wish = services(orchestrator), {"parallel_tool_calls": False}
    async with connected(orchestrator, shared) as client:
        client.update(tools=[WEATHER], **(wish if at == "session" else {}))
        client.send("response.create", response=wish if at == "response" else {})
        ended = (await client.find("response.done"))["response"]
        assert [item["type"] for item in ended["output"]] == ["function_call"]
    name = "sglang_live_gateway_tool_calls_total"
    assert shared.metrics.registry.get_sample_value(name, {"outcome": "surplus"}) == 1
