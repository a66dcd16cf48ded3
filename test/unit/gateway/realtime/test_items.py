"""conversation.item.*: create, delete, retrieve, truncate, and their effect on the history."""

import asyncio
import base64

import numpy as np
import pytest

from sglang_live.core import AudioPart, TextPart
from sglang_live.gateway.call.conversation import conversation
from sglang_live.gateway.call.conversation.conversation import Conversation, ItemBudget
from sglang_live.gateway.call.conversation.items import MessageItem
from test.unit.gateway.fakes import FakeOrchestrator, connected, spoken, tone, types


def message(role: str, *content: dict, **fields) -> dict:
    return {"type": "message", "role": role, "content": list(content), **fields}


def text(kind: str, value: str) -> dict:
    return {"type": kind, "text": value}


async def history_of(client, orchestrator):
    client.send("response.create", response={"output_modalities": ["text"]})
    await client.until("response.done")
    return orchestrator.turns[-1].history


async def test_items_keep_the_clients_ids_and_places():
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator) as client:
        client.say("b", "b")
        client.say("d", "d", previous_item_id="b")
        client.say("a", "a", previous_item_id="root")
        client.say("c", "c", previous_item_id="b")
        added = [e for e in await client.settle() if e["type"] == "conversation.item.added"]
        places = [(e["item"]["id"], e["previous_item_id"]) for e in added]
        assert places == [("b", None), ("d", "b"), ("a", None), ("c", "b")]
        history = await history_of(client, orchestrator)
        assert [item.parts[0].text for item in history] == ["a", "b", "c", "d"]


async def test_every_kind_of_item_reaches_the_model():
    orchestrator = FakeOrchestrator()
    audio = base64.b64encode(tone(500)).decode()
    items = [
        message("system", text("input_text", "Rules.")),
        message(
            "user",
            text("input_text", "Listen:"),
            {"type": "input_audio", "audio": audio, "transcript": "hm"},
        ),
        message("assistant", text("output_text", "I heard.")),
        {"type": "function_call", "name": "look", "arguments": '{"at": 1}', "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c1", "output": "a lamp"},
        message("user"),
        message("user", text("input_text", "")),
    ]
    async with connected(orchestrator) as client:
        for item in items:
            client.send("conversation.item.create", item=item)
        events = await client.settle()
        assert types(events) == ["conversation.item.added", "conversation.item.done"] * 7
        assert all(e["item"]["status"] == "completed" for e in events)
        assert "audio" not in events[2]["item"]["content"][1]
        history = await history_of(client, orchestrator)
        # The two empty items are not in the history.
        assert [item.role for item in history] == [
            "system",
            "user",
            "assistant",
            "assistant",
            "tool",
        ]
        heard = history[1].parts[1]
        assert isinstance(heard, AudioPart)
        assert heard.duration_s == pytest.approx(0.5)
        assert '"name": "look", "arguments": {"at": 1}' in history[3].parts[0].text
        assert history[4].parts == (TextPart("a lamp"),)
        assert len({item.key for item in history}) == len(history)


@pytest.mark.parametrize(
    ("item", "code", "param"),
    [
        (
            message("user", {"type": "input_image", "image_url": "data:image/png;base64,AA=="}),
            "unsupported_content_type",
            "item.content[0].type",
        ),
        (
            message("assistant", {"type": "output_audio", "audio": "AAAA"}),
            "unsupported_content_type",
            "item.content[0].type",
        ),
        (
            message("user", text("output_text", "x")),
            "unsupported_content_type",
            "item.content[0].type",
        ),
        (message("tool", text("input_text", "x")), "invalid_value", "item.role"),
        (
            message("user", {"type": "input_text"}),
            "missing_required_parameter",
            "item.content[0].text",
        ),
        (
            message("user", {"type": "input_audio", "audio": "AA=="}),
            "invalid_value",
            "item.content[0].audio",
        ),
        ({"type": "mcp_call", "name": "x"}, "invalid_value", "item.type"),
        ({"type": "function_call", "name": "x"}, "missing_required_parameter", "item.arguments"),
        (message("user", id="x" * 200), "invalid_value", "item.id"),
    ],
)
async def test_an_invalid_item_is_one_error_and_no_item(item, code, param):
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator) as client:
        client.send("conversation.item.create", item=item, event_id="c")
        error = (await client.expect("error"))["error"]
        assert (error["code"], error["param"], error["event_id"]) == (code, param, "c")
        assert await history_of(client, orchestrator) == ()


async def test_duplicate_ids_and_unknown_places_are_errors():
    async with connected(FakeOrchestrator()) as client:
        client.say("x", "x")
        client.say("again", "x")
        client.say("y", "y", previous_item_id="nowhere")
        errors = [e["error"]["code"] for e in await client.settle() if e["type"] == "error"]
        assert errors == ["item_create_duplicate_item_id", "item_create_invalid_previous_item_id"]


async def test_the_id_of_a_deleted_item_is_free_again_with_a_new_key():
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator) as client:
        client.say("same words", "x")
        (first,) = await history_of(client, orchestrator)
        client.send("conversation.item.delete", item_id="x")
        assert (await client.find("conversation.item.deleted"))["item_id"] == "x"
        client.say("same words", "x", previous_item_id="root")
        await client.until("conversation.item.done")
        second = (await history_of(client, orchestrator))[0]
        assert second.parts == first.parts
        assert second.key != first.key


def test_the_number_of_empty_items_is_bounded():
    conversation = Conversation(max_bytes=1000, budget=ItemBudget(10_000))
    dropped = []
    for n in range(5000):
        conversation.insert(MessageItem(f"i{n}", "user", []))
        dropped += conversation.drop_oldest_if_full()
    assert dropped[0] == "i0"
    assert conversation.last_id == "i4999"
    assert 5000 - len(dropped) <= 4096


@pytest.mark.parametrize("action", ["delete", "retrieve", "truncate"])
async def test_unknown_ids_have_their_own_code(action):
    fields = {"content_index": 0, "audio_end_ms": 0} if action == "truncate" else {}
    async with connected(FakeOrchestrator()) as client:
        client.send(f"conversation.item.{action}", item_id="gone", event_id="rci_gone", **fields)
        error = (await client.expect("error"))["error"]
        assert error["code"] == f"item_{action}_invalid_item_id"
        assert error["event_id"] == "rci_gone"


async def test_retrieve_returns_the_users_audio():
    async with connected(FakeOrchestrator()) as client:
        sent = tone(400)
        item = message(
            "user",
            {"type": "input_audio", "audio": base64.b64encode(sent).decode()},
            id="heard",
        )
        client.send("conversation.item.create", item=item)
        client.send("conversation.item.retrieve", item_id="heard")
        retrieved = await client.find("conversation.item.retrieved")
        audio = base64.b64decode(retrieved["item"]["content"][0]["audio"])
        before, after = (np.frombuffer(raw, "<i2").astype(float) for raw in (sent, audio))
        assert len(after) == len(before)
        assert np.abs(before - after)[240:-240].max() < 50


async def test_retrieve_omits_audio_that_does_not_fit_into_a_clients_frame():
    async with connected(FakeOrchestrator()) as client:
        audio = base64.b64encode(tone(20_000)).decode()
        item = message("user", {"type": "input_audio", "audio": audio}, id="long")
        client.send("conversation.item.create", item=item)
        client.send("conversation.item.retrieve", item_id="long")
        retrieved = await client.find("conversation.item.retrieved")
        assert "audio" not in retrieved["item"]["content"][0]


async def test_an_assistant_item_can_be_retrieved_while_it_runs_and_after_a_truncation():
    gate = asyncio.Event()
    orchestrator = FakeOrchestrator([[*spoken("One two three four", 800)[:-1], gate]])
    async with connected(orchestrator) as client:
        client.send("response.create")
        item_id = (await client.find("response.output_item.added"))["item"]["id"]
        await client.settle()
        client.send("conversation.item.retrieve", item_id=item_id)
        item = (await client.expect("conversation.item.retrieved"))["item"]
        assert item["status"] == "in_progress"
        assert base64.b64decode(item["content"][0]["audio"]) == tone(80) * 10
        client.send("response.cancel")
        await client.until("response.done")
        client.send(
            "conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=400
        )
        client.send("conversation.item.retrieve", item_id=item_id)
        item = (await client.find("conversation.item.retrieved"))["item"]
        assert item["content"][0]["transcript"] == "One two"
        assert base64.b64decode(item["content"][0]["audio"]) == tone(80) * 5


async def assistant_item_of(client) -> str:
    client.send("response.create")
    return (await client.find("response.done"))["response"]["output"][0]["id"]


async def test_a_truncation_of_a_complete_item_changes_its_key_and_drops_its_tokens():
    orchestrator = FakeOrchestrator([spoken("One two three four five six", 800)])
    async with connected(orchestrator) as client:
        item_id = await assistant_item_of(client)
        client.send(
            "conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=400
        )
        (heard,) = await history_of(client, orchestrator)
        assert heard.parts == (TextPart("One two three"),)
        assert heard.token_ids is None
        assert heard.key != "reply:One two three four five six"
        (same,) = (await history_of(client, orchestrator))[:1]
        assert same.key == heard.key


@pytest.mark.parametrize("audio_end_ms", [800, 801, 1300])
async def test_a_truncation_at_or_a_little_beyond_the_end_changes_nothing(audio_end_ms):
    orchestrator = FakeOrchestrator([spoken("One two three", 800)])
    async with connected(orchestrator) as client:
        item_id = await assistant_item_of(client)
        cut = {"item_id": item_id, "content_index": 0, "audio_end_ms": audio_end_ms}
        client.send("conversation.item.truncate", **cut)
        assert (await client.expect("conversation.item.truncated"))["audio_end_ms"] == audio_end_ms
        (heard,) = await history_of(client, orchestrator)
        assert (heard.key, heard.token_ids) == ("reply:One two three", (1, 2, 3))


async def test_an_assistant_item_of_which_nothing_was_heard_leaves_the_history():
    orchestrator = FakeOrchestrator([spoken("One two three", 800)])
    async with connected(orchestrator) as client:
        item_id = await assistant_item_of(client)
        client.send("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=0)
        assert await history_of(client, orchestrator) == ()


async def test_a_second_truncation_restores_no_words():
    orchestrator = FakeOrchestrator([spoken("One two three four", 800)])
    async with connected(orchestrator) as client:
        item_id = await assistant_item_of(client)
        for end_ms in (200, 700):
            client.send(
                "conversation.item.truncate",
                item_id=item_id,
                content_index=0,
                audio_end_ms=end_ms,
            )
            await client.expect("conversation.item.truncated")
        (heard,) = await history_of(client, orchestrator)
        assert heard.parts == (TextPart("One"),)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"audio_end_ms": 1301}, "audio_end_ms"),
        ({"audio_end_ms": -1}, "audio_end_ms"),
        ({"content_index": 1}, "content_index"),
        ({"item_id": "words"}, "item_id"),
    ],
)
async def test_an_invalid_truncation_is_an_error(fields, param):
    async with connected(FakeOrchestrator([spoken("One two", 800)])) as client:
        item_id = await assistant_item_of(client)
        client.say("words", "words")
        await client.until("conversation.item.done")
        cut = {"item_id": item_id, "content_index": 0, "audio_end_ms": 100, **fields}
        client.send("conversation.item.truncate", **cut)
        assert (await client.expect("error"))["error"]["param"] == param


async def test_deleting_a_running_assistant_item_does_not_disturb_its_response():
    gate = asyncio.Event()
    steps = spoken("Going on.")
    orchestrator = FakeOrchestrator([[*steps[:3], gate, *steps[3:]]])
    async with connected(orchestrator) as client:
        client.send("response.create")
        item_id = (await client.find("response.output_item.added"))["item"]["id"]
        client.send("conversation.item.delete", item_id=item_id)
        await client.until("conversation.item.deleted")
        gate.set()
        events = await client.until("response.done")
        assert "conversation.item.done" not in types(events)
        assert events[-1]["response"]["status"] == "completed"
        assert await history_of(client, orchestrator) == ()


@pytest.mark.parametrize(
    "item",
    [
        message("user", text("input_text", "x" * 600_000), text("input_text", "y" * 600_000)),
        {"type": "function_call_output", "call_id": "c", "output": "x" * 1_100_000},
        message("user", *[text("input_text", "")] * 257),
    ],
)
async def test_an_item_longer_than_any_context_is_refused(item):
    """Echoed twice, it could exceed the client's send buffer."""
    async with connected(FakeOrchestrator()) as client:
        client.send("conversation.item.create", item=item)
        await client.expect("error")
        client.update(instructions="x" * 1_100_000)
        assert (await client.expect("error"))["error"]["code"] == "text_too_large"
        assert await client.settle() == []


async def test_assistant_items_alone_are_bounded(monkeypatch):
    """A client may request responses without any item of its own in the conversation."""
    monkeypatch.setattr(conversation, "_MAX_ITEMS", 8)
    async with connected(FakeOrchestrator([spoken("Well.", 80) for _ in range(20)])) as client:
        left = 0
        for _ in range(20):
            client.send("response.create", response={"input": []})
            await client.until("response.done")
            left += types(await client.settle()).count("conversation.item.deleted")
        assert 12 <= left <= 14
