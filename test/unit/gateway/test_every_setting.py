"""No setting of OpenAI's types is accepted without an effect.

Every field of the installed types is set once. It is refused by its path, or something that can be
observed changes, or it is listed here and in docs/protocol.md.
"""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import httpx
from msgspec import inspect

from sglang_live.gateway.chat.form import ChatForm
from sglang_live.gateway.http.speech import SpeechForm
from sglang_live.gateway.realtime.client_secrets import ClientSecretForm
from sglang_live.gateway.realtime.events import AnyClientEvent
from test.protocol.ga_events import CALL_ID, client_secret_requests, events
from test.unit.gateway.fakes import FakeOrchestrator, app_of, connected, done

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "name": "weather", "call_id": CALL_ID, "arguments": "{}"}
SECRETS = "/v1/realtime/client_secrets"
# Fields that change nothing (docs/protocol.md): an error repeats the event's id, a rate is that of
# its format, and OpenAI's names of models mean the served one.
NO_EFFECT = {
    "event_id",
    "session.model",
    "session.audio.input.format.rate",
    "session.audio.output.format.rate",
    "response.audio.output.format.rate",
}
# Values that ask for what the server does anyway.
NEUTRAL: dict[str, tuple[Any, ...]] = {"session.tracing": ("auto",)}
_IDS = {
    "id",
    "item_id",
    "previous_item_id",
    "event_id",
    "response_id",
    "conversation_id",
    "key",
    "call_id",
}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Paths of the values in a value, without indices. JSON schemas and the like are one value."""
    if isinstance(value, dict) and value and not path.endswith(("parameters", "metadata")):
        for key, part in value.items():
            yield from leaves(part, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list) and value:
        for part in value:
            yield from leaves(part, f"{path}[]")
    else:
        yield path, value


def new_in(event: dict[str, Any], least: dict[str, Any]) -> list[str]:
    """Paths of the values that an event has, and the least event of its type has not."""
    known = [*leaves(least)]
    return [path for path, value in leaves(event) if (path, value) not in known]


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in _IDS}
    if isinstance(value, list | tuple):
        return [without_ids(part) for part in value]
    return value


async def observed(event: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """The error of an event, and all that a client and the stages see of its effect."""
    called = '{"name": "weather", "arguments": {}}'
    orchestrator = FakeOrchestrator([[done("", function_calls=(called, called))]])
    async with connected(orchestrator) as client:
        client.update(tools=[WEATHER])
        client.send("conversation.item.create", item=CALL)
        await client.until("conversation.item.done")
        client.say("Hi.")
        await client.until("conversation.item.done")
        client.send_raw(json.dumps(event))
        if event["type"] == "session.update":
            client.send("response.create")
        seen: list[Any] = []
        while not seen or seen[-1]["type"] not in ("response.done", "error"):
            seen.append(await client.next())
        if seen[-1]["type"] == "error":
            if event["type"] == "session.update":
                await client.until("response.done")
            return seen[-1]["error"], ""
        turns = [dataclasses.asdict(turn) for turn in orchestrator.turns]
        return None, repr(without_ids([*seen, *turns]))


async def check_fields(kind: str, allowed: list[dict[str, Any]]) -> int:
    """
    kind: of the events.
    allowed: all that the types allow.
    Returns the number of fields that were tried.
    """
    drawn = [event for event in allowed if event["type"] == kind]
    least = min(drawn, key=lambda event: len(json.dumps(event)))
    error, nothing = await observed(least)
    assert error is None and await observed(least) == (None, nothing)
    # By path: whether some value of it was accepted, and whether one had an effect.
    accepted: dict[str, list[Any]] = defaultdict(list)
    effective, tried = set(), set()
    for event in drawn:
        paths = new_in(event, least)
        tried |= set(paths)
        error, seen = await observed(event)
        if error is not None:
            assert error["code"] != "unknown_parameter", ("a new field", event)
            at = error["param"].replace("[0]", "[]")
            assert any(path.startswith(at) for path in paths) or at.endswith("type"), (event, error)
            continue
        if seen != nothing:
            effective |= set(paths)
        for path, value in leaves(event):
            if path in paths:
                accepted[path].append(value)
    silent = {
        path: values
        for path, values in accepted.items()
        if path not in effective | NO_EFFECT
        and any(value not in (None, [], {}, *NEUTRAL.get(path, ())) for value in values)
    }
    assert not silent, silent
    return len(tried)


async def test_every_setting_of_a_session_has_an_effect_or_is_refused():
    assert await check_fields("session.update", list(events())) > 30


async def test_every_setting_of_a_response_has_an_effect_or_is_refused():
    assert await check_fields("response.create", list(events())) > 20


async def test_a_client_secret_refuses_what_a_session_refuses():
    transport = httpx.ASGITransport(app_of(FakeOrchestrator()))
    n_refused = 0
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        for body in client_secret_requests():
            settings = body.get("session") or {"type": "realtime"}
            protocol = {"transcribes": settings["type"] == "transcription"}
            async with connected(FakeOrchestrator(), protocol=protocol) as client:
                client.send("session.update", session=settings)
                event = await client.next()
            response = await http.post(SECRETS, json=body)
            if event["type"] == "session.updated":
                assert response.status_code == 200, (body, response.text)
                continue
            n_refused += 1
            error, same = response.json()["error"], event["error"]
            assert (error["code"], error["param"]) == (same["code"], same["param"]), body
    assert n_refused > 10


def optional_fields(kind: Any, seen: set[type]) -> Iterator[tuple[str, str, bool]]:
    """Struct and name of each field that may be absent, in a type, and whether it may be null."""
    if isinstance(kind, inspect.StructType):
        if kind.cls in seen:
            return
        seen.add(kind.cls)
        for field in kind.fields:
            kinds = getattr(field.type, "types", (field.type,))
            may_be_null = any(isinstance(k, inspect.NoneType | inspect.AnyType) for k in kinds)
            if not field.required:
                yield kind.cls.__name__, field.name, may_be_null
            yield from optional_fields(field.type, seen)
    for name in ("types", "type", "item_type", "value_type"):
        inner = getattr(kind, name, ())
        for part in inner if isinstance(inner, tuple) else (inner,):
            yield from optional_fields(part, seen)


def test_null_is_an_absent_value_in_every_form():
    forms = (ChatForm, SpeechForm, ClientSecretForm, AnyClientEvent)
    fields = [field for form in forms for field in optional_fields(inspect.type_info(form), set())]
    assert len(fields) > 150
    assert [(cls, name) for cls, name, may_be_null in fields if not may_be_null] == []
