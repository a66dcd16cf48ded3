"""Slightly wrong events: keys added, renamed, retyped and removed at any depth."""

import asyncio
import copy
import os
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from test.protocol.ga_events import events
from test.unit.gateway.fakes import FakeOrchestrator, connected
from test.unit.gateway.http.test_unknown_parameters import BETA, events_after, is_marker, prepare

# More by hand: N_FUZZED=20000.
N_FUZZED = int(os.environ.get("N_FUZZED", "1000"))
VALID = list(events())
KEYS = sorted({path.split(".")[1] for path in BETA} | {"type", "id", "no_such_key", "", "\u2028"})
ODD = st.sampled_from(
    [None, True, 0, -1, 2**70, 1.5, 1e308, "", "x", "\ud800", "\x00\n", [], {}, [[]], [{}]]
).map(copy.deepcopy)


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Paths of all values inside a value, and of the value itself."""
    found = [path]
    parts = value.items() if isinstance(value, dict) else ()
    parts = enumerate(value) if isinstance(value, list) else parts
    for key, part in parts:
        found += places(part, (*path, key))
    return found


@st.composite
def mutated(draw, valid: list[dict[str, Any]]) -> dict[str, Any]:
    event = copy.deepcopy(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(1, 3))):
        if not event:
            return {draw(st.sampled_from(KEYS)): draw(ODD)}
        *above, key = draw(st.sampled_from(places(event)[1:]))
        holder = event
        for step in above:
            holder = holder[step]
        how = draw(st.sampled_from(["add", "rename", "retype", "lose", "swap"]))
        if how == "retype":
            holder[key] = draw(ODD)
        elif how == "lose" and key != "type":
            holder.pop(key)
        elif how == "swap":  # a valid piece of another event
            other = list(draw(st.sampled_from(valid)).values()) or [{}]
            holder[key] = copy.deepcopy(draw(st.sampled_from(other)))
        elif isinstance(holder, dict):
            name = draw(st.sampled_from(KEYS) | st.text(max_size=4))
            holder[name] = holder.pop(key) if how == "rename" and key != "type" else draw(ODD)
    return event


async def try_out(fuzzed: list[dict[str, Any]]) -> int:
    """Returns the number of refused events."""
    n_refused = 0
    async with connected(FakeOrchestrator()) as client:
        await prepare(client)
        for number, event in enumerate(fuzzed):
            event = {**event, "event_id": f"e{number}"}
            before = await shown(client), client.wire.seen.item_ids
            received = await events_after(client, event)
            errors = [a["error"] for a in received if a["type"] == "error"]
            assert len(errors) <= 1, (event, errors)
            for error in errors:
                n_refused += 1
                assert error["type"] == "invalid_request_error", (event, error)
                assert error["event_id"] == event["event_id"], (event, error)
                assert error["message"] and error["code"]
                assert (await shown(client), client.wire.seen.item_ids) == before, event
    return n_refused


async def shown(client) -> dict[str, Any]:
    client.send("session.update", session={"type": "realtime"})
    while (event := await client.next())["type"] != "session.updated":
        assert not is_marker(event)
    return event["session"]


@settings(
    max_examples=N_FUZZED // 5,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(mutated(VALID), min_size=5, max_size=5))
def test_a_slightly_wrong_event_has_its_result_or_one_error_and_no_change(fuzzed):
    asyncio.run(try_out(fuzzed))
