"""Long conversations: the `truncation` setting, and items that leave after compaction."""

import asyncio
import base64

import pytest

from sglang_live.kv.retention import RetentionConfig
from test.unit.gateway.fakes import FakeOrchestrator, connected, done, services, spoken, tone, types

from .playback_world import (
    COUGH,
    SILENCE_300MS,
    TRUNCATED,
    VOICE,
    WORDS,
    World,
    interrupted_end,
    start,
)

SERVER = RetentionConfig(sink_tokens=7, window_tokens=200, slack_tokens=50)
DELETED = "conversation.item.deleted"
TEXT = {"output_modalities": ["text"]}


def ratio(value: float, limit: int | None = None) -> dict:
    form = {"type": "retention_ratio", "retention_ratio": value}
    return form if limit is None else form | {"token_limits": {"post_instructions": limit}}


async def updated(client, truncation):
    client.update(truncation=truncation)
    return (await client.expect("session.updated"))["session"]["truncation"]


async def respond(client, **form) -> list:
    """All events of a text response and its consequences."""
    client.send("response.create", response={**TEXT, **form})
    return [*await client.until("response.done"), *await client.settle()]


async def retention_of(client, orchestrator) -> RetentionConfig | None:
    await respond(client)
    return orchestrator.turns[-1].retention


# --- the setting ---


async def test_the_servers_retention_is_the_default():
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator, retention=SERVER) as client:
        assert await retention_of(client, orchestrator) == SERVER
        client.update()
        assert (await client.expect("session.updated"))["session"]["truncation"] == "auto"


@pytest.mark.parametrize(
    ("truncation", "window_tokens", "slack_tokens"),
    [
        (ratio(0.8, 1000), 800, 200),
        (ratio(0.5, 65), 32, 33),
        (ratio(0.8), 200, 50),
        (ratio(0.4), 100, 150),
        (ratio(1.0, 500), 500, 1),
        (ratio(0.001, 64), 1, 63),
    ],
)
async def test_the_ratio_is_the_part_of_an_exceeded_limit_that_is_left(
    truncation, window_tokens, slack_tokens
):
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator, retention=SERVER) as client:
        assert await updated(client, truncation) == truncation
        assert await retention_of(client, orchestrator) == RetentionConfig(
            sink_tokens=None, window_tokens=window_tokens, slack_tokens=slack_tokens
        )


async def test_a_session_can_keep_everything_and_return_to_the_default():
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator, retention=SERVER) as client:
        assert await updated(client, "disabled") == "disabled"
        assert await retention_of(client, orchestrator) is None
        client.update(instructions="Be brief.")
        session = (await client.expect("session.updated"))["session"]
        assert session["truncation"] == "disabled", "absent keys keep their value"
        assert await updated(client, None) == "auto"
        assert await retention_of(client, orchestrator) == SERVER


async def test_empty_token_limits_are_not_echoed():
    async with connected(FakeOrchestrator(), retention=SERVER) as client:
        for empty in (None, {}, {"post_instructions": None}):
            assert await updated(client, ratio(0.5) | {"token_limits": empty}) == ratio(0.5)


@pytest.mark.parametrize(
    ("truncation", "code", "path"),
    [
        ("sometimes", "invalid_value", ""),
        (7, "invalid_type", ""),
        ([], "invalid_type", ""),
        ({"retention_ratio": 0.5}, "missing_required_parameter", ".type"),
        ({"type": "auto"}, "invalid_value", ".type"),
        ({"type": "retention_ratio"}, "missing_required_parameter", ".retention_ratio"),
        (ratio(0), "invalid_value", ".retention_ratio"),
        (ratio(1.01), "invalid_value", ".retention_ratio"),
        (ratio(0.5) | {"retention_ratio": "0.5"}, "invalid_type", ".retention_ratio"),
        (ratio(0.5) | {"token_limits": 100}, "invalid_type", ".token_limits"),
        (ratio(0.5) | {"extra": []}, "unknown_parameter", ".extra"),
        (ratio(0.5) | {"token_limits": {"n": 1}}, "unknown_parameter", ".token_limits.n"),
        (ratio(0.5, 63), "invalid_value", ".token_limits.post_instructions"),
        (ratio(0.5, 1_000_001), "invalid_value", ".token_limits.post_instructions"),
    ],
)
async def test_invalid_bounds_are_refused_with_their_path(truncation, code, path):
    async with connected(FakeOrchestrator(), retention=SERVER) as client:
        await updated(client, "disabled")
        client.update(truncation=truncation, instructions="new")
        error = (await client.expect("error"))["error"]
        assert (error["code"], error["param"]) == (code, "session.truncation" + path)
        client.update()
        session = (await client.expect("session.updated"))["session"]
        assert (session["truncation"], session["instructions"]) == ("disabled", "")


async def test_a_server_that_keeps_everything_refuses_a_ratio():
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator) as client:
        for word in ("disabled", "auto"):
            assert await updated(client, word) == word
            assert await retention_of(client, orchestrator) is None
        client.update(truncation=ratio(0.8, 1000))
        error = (await client.expect("error"))["error"]
        assert (error["code"], error["param"]) == ("invalid_value", "session.truncation")
        assert "keeps whole conversations" in error["message"]


async def test_stateless_responses_have_no_retention():
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator, retention=SERVER) as client:
        await respond(client, conversation="none")
        await respond(client, input=[])
        await respond(client)
        assert [turn.retention for turn in orchestrator.turns] == [None, None, SERVER]


# --- items that leave ---


async def add_items(client, orchestrator, *item_ids: str) -> dict[str, str]:
    """Adds items with these ids. Returns the history key of each."""
    for item_id in item_ids:
        client.say(item_id, item_id)
    await client.settle()
    await respond(client)
    return {item.parts[0].text: item.key for item in orchestrator.turns[-1].history}


async def exists(client, item_id: str) -> bool:
    client.send("conversation.item.retrieve", item_id=item_id)
    return (await client.next())["type"] == "conversation.item.retrieved"


async def texts_of_the_next_turn(client, orchestrator) -> list[str]:
    await respond(client)
    return [item.parts[0].text for item in orchestrator.turns[-1].history]


async def test_items_of_which_nothing_is_left_are_deleted_after_the_response():
    orchestrator = FakeOrchestrator([spoken("First.")])
    shared = services(orchestrator, retention=SERVER)
    async with connected(orchestrator, shared) as client:
        keys = await add_items(client, orchestrator, "a", "b", "c")
        gone = (keys["c"], "unknown", keys["a"], "reply:First.")
        orchestrator.scripts.append([done("Second.", gone=gone)])
        events = await respond(client)
        at = types(events).index("response.done")
        left = events[at + 1 :]
        assert types(left) == [DELETED] * 3
        # In the order of the conversation, not of the keys.
        assert [event["item_id"] for event in left[:2]] == ["a", "c"]
        assert left[2]["item_id"] not in ("a", "b", "c")
        assert not await exists(client, "a")
        assert await exists(client, "b")
        texts = await texts_of_the_next_turn(client, orchestrator)
        assert texts == ["b", "Second."]
    value = shared.metrics.registry.get_sample_value
    name = "sglang_live_gateway_items_dropped_total"
    assert value(name, {"reason": "window"}) == 3
    assert value(name, {"reason": "full"}) is None


async def test_drops_of_a_full_conversation_have_their_own_count():
    orchestrator = FakeOrchestrator()
    shared = services(orchestrator, max_conversation_bytes=100)
    async with connected(orchestrator, shared) as client:
        for item_id in ("a", "b"):
            client.say("x" * 60, item_id)
        events = await client.settle()
        assert [e["item_id"] for e in events if e["type"] == DELETED] == ["a"]
    value = shared.metrics.registry.get_sample_value
    assert value("sglang_live_gateway_items_dropped_total", {"reason": "full"}) == 1


async def test_the_audio_of_items_that_have_left_does_not_count():
    orchestrator = FakeOrchestrator([spoken("Yes.")])
    n_bytes = 16_000 * 2 * 2  # two seconds, as kept
    limits = {"retention": SERVER, "max_conversation_bytes": int(1.5 * n_bytes)}
    async with connected(orchestrator, **limits) as client:
        audio = base64.b64encode(tone(2000)).decode()
        item = {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_audio", "audio": audio}],
        }
        client.send("conversation.item.create", item=item | {"id": "old"})
        await client.settle()
        await respond(client)
        key = orchestrator.turns[-1].history[0].key
        orchestrator.scripts.append([done("More.", gone=(key,))])
        await respond(client)
        client.send("conversation.item.create", item=item | {"id": "new"})
        assert DELETED not in types(await client.settle())


async def test_an_item_that_was_truncated_during_the_turn_stays():
    gate = asyncio.Event()
    orchestrator = FakeOrchestrator([spoken("One two three four", 800)])
    async with connected(orchestrator, retention=SERVER) as client:
        client.say("a", "a")
        client.send("response.create")
        response = (await client.find("response.done"))["response"]
        item_id = response["output"][0]["id"]
        orchestrator.scripts.append([gate, done("Next.", gone=("reply:One two three four",))])
        client.send("response.create", response=TEXT)
        await client.expect("response.created")
        cut = {"item_id": item_id, "content_index": 0, "audio_end_ms": 400}
        client.send("conversation.item.truncate", **cut)
        await client.expect(TRUNCATED)
        gate.set()
        await client.until("response.done")
        assert await client.settle() == []
        texts = await texts_of_the_next_turn(client, orchestrator)
        assert texts == ["a", "One two", "Next."]


async def test_an_item_that_the_client_has_deleted_is_not_deleted_again():
    gate = asyncio.Event()
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator, retention=SERVER) as client:
        keys = await add_items(client, orchestrator, "a", "b")
        orchestrator.scripts.append([gate, done("Next.", gone=tuple(keys.values()))])
        client.send("response.create", response=TEXT)
        await client.expect("response.created")
        await client.settle()
        client.send("conversation.item.delete", item_id="a")
        await client.expect(DELETED)
        gate.set()
        await client.until("response.done")
        assert [(e["type"], e["item_id"]) for e in await client.settle()] == [(DELETED, "b")]


async def test_out_of_band_responses_delete_nothing():
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator, retention=SERVER) as client:
        keys = await add_items(client, orchestrator, "a")
        for form in ({"conversation": "none"}, {"input": []}):
            orchestrator.scripts.append([done("Aside.", gone=tuple(keys.values()))])
            assert DELETED not in types(await respond(client, **form))
        assert await exists(client, "a")


async def test_items_have_left_before_a_waiting_response_begins():
    gate = asyncio.Event()
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator, retention=SERVER) as client:
        keys = await add_items(client, orchestrator, "a", "b")
        client.turn_detection({"interrupt_response": False})
        await client.expect("session.updated")
        orchestrator.scripts.append([gate, *spoken("Slow.")[:-1], done("Slow.", gone=(keys["a"],))])
        client.send("response.create")
        await client.expect("response.created")
        await client.settle()
        client.append(VOICE + bytes(48_000))
        await client.until("conversation.item.done")
        gate.set()
        await client.until("response.done")
        assert (await client.expect(DELETED))["item_id"] == "a"
        await client.expect("response.created")
        await client.until("response.done")
        assert keys["a"] not in [item.key for item in orchestrator.turns[-1].history]


# --- interruptions ---


async def test_items_that_an_interrupted_turn_compacted_leave_at_its_end():
    ending = asyncio.Event()
    world = World(retention=SERVER)
    async with world.connect() as client:
        keys = await add_items(client, world.orchestrator, "a", "b")
        world.session.on_interrupt = [ending, interrupted_end(gone=(keys["a"],))]
        world.orchestrator.scripts.append(
            [*spoken(WORDS, 1600)[:-1], asyncio.Event(), done(WORDS)],
        )
        await start(client)
        await world.play(client, 0.9)
        client.append(VOICE)
        events = await client.until(TRUNCATED)
        assert "response.done" in types(events)
        assert await client.settle() == []
        assert await exists(client, "a")
        ending.set()
        deleted = await client.expect(DELETED)
        assert deleted["item_id"] == "a"
        assert await client.settle() == []
        client.append(bytes(48_000))
        await client.until("response.done")
        history = world.orchestrator.turns[-1].history
        assert [item.role for item in history] == ["user", "assistant", "assistant", "user"]
        assert history[0].key == keys["b"]
    assert world.value("items_dropped_total", reason="window") == 1


async def test_while_an_interruption_is_unconfirmed_deletions_wait_behind_their_response():
    gate = asyncio.Event()
    world = World(retention=SERVER)
    async with world.connect() as client:
        keys = await add_items(client, world.orchestrator, "a")
        steps = spoken("Well then.", 800)
        end = done("Well then.", gone=(keys["a"],))
        world.orchestrator.scripts.append([*steps[:-1], gate, end])
        await start(client)
        client.append(COUGH)
        assert await client.settle() == []
        gate.set()
        await asyncio.sleep(0.01)
        assert await client.settle() == []
        client.append(SILENCE_300MS)
        events = await client.until(DELETED)
        assert types(events)[-2:] == ["response.done", DELETED]
