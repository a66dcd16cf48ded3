"""Conversations of every size: after any sequence of events a small turn gets a response.

The fake session drops history items by the thinker's own rules.
"""

import asyncio
import base64
import os
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_live.core import AudioPart, HistoryItem, Medium, TurnEvent, TurnRequest
from sglang_live.errors import ContextLengthError
from sglang_live.stages.thinker.prompt_sizes import newest_that_fit, room_for_header
from test.unit.gateway.fakes import FakeOrchestrator, FakeSession, connected, done, tone
from test.unit.gateway.http.test_unknown_parameters import WEATHER, events_after

from .test_event_fuzz import shown

# More by hand: N_FUZZED=20000.
N_FUZZED = int(os.environ.get("N_FUZZED", "1000"))
N_EVENTS = 8
MOST = 100  # tokens of a prompt; a character is one, a second of audio ten
SIZES = st.sampled_from([0, 1, 3, 20, 40, 60, 74, 76, 90, 99, 100, 101, 500])
NAMES = st.sampled_from(["a", "b", "c", "d"])
TEXT = {"output_modalities": ["text"]}


class FakePrompt:
    """Counts tokens in the same way as FakeOrchestrator.measure."""

    def item(self, item: HistoryItem) -> HistoryItem:
        return item

    def media(self, item: HistoryItem) -> list[Medium]:
        return []

    def n_tokens(self, item: HistoryItem, places) -> int:
        texts = (part.text for part in item.parts if not isinstance(part, AudioPart))
        return sum(map(len, texts)) + sum(
            int(10 * part.duration_s) for part in item.parts if isinstance(part, AudioPart)
        )


@dataclass
class FittingSession(FakeSession):
    async def respond(self, turn: TurnRequest) -> AsyncIterator[TurnEvent]:
        self.turns.append(turn)
        header = len(turn.instructions) + sum(map(len, turn.tools.functions))
        if header > room_for_header(MOST):
            raise ContextLengthError("The instructions and tools are too long.")
        history = list(turn.history)
        kept = newest_that_fit(FakePrompt(), history, MOST - header, turn.drops_oldest)
        yield done("Yes.", gone=tuple(item.key for item in history[: len(history) - len(kept)]))


@dataclass(eq=False)
class FittingOrchestrator(FakeOrchestrator):
    async def open_session(self, session_id: str) -> FakeSession:
        self.sessions.append(FittingSession(session_id, self.scripts))
        return self.session


def message(role: str, n: int, name: str | None = None) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    item = {"type": "message", "role": role, "content": [{"type": kind, "text": "x" * n}]}
    return item if name is None else item | {"id": name}


def audio_message(n: int) -> dict[str, Any]:
    sound = base64.b64encode(tone(100 * min(n, 200))).decode()
    content = [{"type": "input_audio", "audio": sound}]
    return {"type": "message", "role": "user", "content": content}


def call(name: str, n: int) -> dict[str, Any]:
    arguments = f'{{"a":"{"x" * n}"}}'
    return {"type": "function_call", "name": "f", "arguments": arguments, "call_id": name}


ROLES = st.sampled_from(["user", "system", "assistant"])
ITEMS = st.one_of(
    st.builds(message, ROLES, SIZES, NAMES | st.none()),
    st.builds(audio_message, SIZES),
    st.builds(call, NAMES, SIZES),
    st.builds(
        lambda name, n: {"type": "function_call_output", "call_id": name, "output": "x" * n},
        NAMES,
        SIZES,
    ),
)
SETTINGS = st.one_of(
    SIZES.map(lambda n: {"instructions": "x" * n}),
    SIZES.map(lambda n: {"tools": [WEATHER | {"name": "f", "description": "x" * n}]}),
    st.just({"tools": []}),
    st.sampled_from(["auto", "disabled"]).map(lambda how: {"truncation": how}),
    st.sampled_from([0.01, 0.5, 1.0]).map(
        lambda ratio: {"truncation": {"type": "retention_ratio", "retention_ratio": ratio}}
    ),
)
FORMS = st.one_of(
    st.just({}),
    SIZES.map(lambda n: {"instructions": "x" * n}),
    st.lists(ITEMS, max_size=3).map(lambda items: {"conversation": "none", "input": items}),
    st.lists(ITEMS, max_size=3).map(lambda items: {"input": items}),
    NAMES.map(lambda name: {"input": [{"type": "item_reference", "id": name}]}),
)
EVENTS = st.one_of(
    st.builds(lambda item: {"type": "conversation.item.create", "item": item}, ITEMS),
    st.builds(
        lambda item, after: {
            "type": "conversation.item.create",
            "item": item,
            "previous_item_id": after,
        },
        ITEMS,
        NAMES | st.just("root"),
    ),
    NAMES.map(lambda name: {"type": "conversation.item.delete", "item_id": name}),
    NAMES.map(lambda name: {"type": "conversation.item.retrieve", "item_id": name}),
    NAMES.map(
        lambda name: {
            "type": "conversation.item.truncate",
            "item_id": name,
            "content_index": 0,
            "audio_end_ms": 10,
        }
    ),
    SETTINGS.map(lambda form: {"type": "session.update", "session": {"type": "realtime"} | form}),
    FORMS.map(lambda form: {"type": "response.create", "response": TEXT | form}),
)
seen: Counter[str] = Counter()


async def try_out(events: list[dict[str, Any]]) -> None:
    async with connected(FittingOrchestrator(most_tokens=MOST)) as client:
        client.turn_detection(None)
        client.update(instructions="")
        await client.until("session.updated")
        await client.until("session.updated")
        for number, event in enumerate(events):
            event = {**event, "event_id": f"e{number}"}
            before = await shown(client), client.wire.seen.item_ids
            for received in await events_after(client, event):
                if received["type"] == "error":
                    seen[received["error"]["code"]] += 1
                    assert (await shown(client), client.wire.seen.item_ids) == before, event
                if received["type"] == "response.done":
                    status(received)
        if (await small_turn(client)) == "failed":
            assert (await shown(client))["truncation"] == "disabled", events
            client.update(truncation="auto")
            await client.until("session.updated")
            assert await small_turn(client) == "completed", events


async def small_turn(client) -> str:
    client.say("Hi.")
    client.send("response.create", response=TEXT)
    return status(await client.find("response.done"))


def status(event: dict[str, Any]) -> str:
    response = event["response"]
    seen[response["status"]] += 1
    if response["status"] != "completed":
        error = response["status_details"]["error"]
        assert (response["status"], error["type"], error["code"]) == (
            "failed",
            "invalid_request_error",
            "context_length_exceeded",
        )
    return response["status"]


@settings(
    max_examples=N_FUZZED // N_EVENTS,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(EVENTS, min_size=N_EVENTS, max_size=N_EVENTS))
def try_out_drawn(events):
    asyncio.run(try_out(events))


def test_after_any_sequence_of_sizes_a_small_turn_gets_a_response():
    try_out_drawn()
    assert seen["completed"] and seen["failed"] and seen["context_length_exceeded"]
