"""A session that outgrows its window continues; its client gets events of dropped items."""

import pytest

from test.e2e.conftest import wait_until
from test.e2e.socket_client import NO_VAD, clip_24k, connected, is_whole

pytestmark = [pytest.mark.e2e]

LIMIT = 200
SMALL = {
    "type": "retention_ratio",
    "retention_ratio": 0.7,
    "token_limits": {"post_instructions": LIMIT},
}


async def test_a_long_session_drops_its_oldest_items_and_reports_them(server):
    async with connected(server.ws) as socket:
        updated = await socket.session(**NO_VAD, truncation=SMALL)
        assert updated["session"]["truncation"] == SMALL
        first = (await socket.ask("my name is Ann", max_output_tokens=20))["response"]
        for n in range(12):
            if n % 4 == 0:
                done = await socket.say(clip_24k("sp_jfk.flac", 2.0), max_output_tokens=20)
            else:
                done = await socket.ask(f"question {n} of many", max_output_tokens=20)
            assert is_whole(done), done
            assert done["response"]["usage"]["input_tokens"] < LIMIT + 60
        deleted = [e["item_id"] for e in socket.events if e["type"] == "conversation.item.deleted"]
        added = [e["item"]["id"] for e in socket.events if e["type"] == "conversation.item.added"]
        assert first["output"][0]["id"] in deleted
        assert deleted == added[: len(deleted)], "the oldest leave first"
        assert 0 < len(added) - len(deleted) < 12
        wait_until(
            lambda: server.stage_load("thinker", "policy_tokens_compacted") > LIMIT,
            5,
            "compactions",
        )
        assert server.stage_load("thinker", "kv_tokens_used") < LIMIT + 100


async def test_a_window_can_be_turned_off_in_the_middle_of_a_session(server):
    async with connected(server.ws) as socket:

        async def input_tokens() -> int:
            # Random weights end a response anywhere: the number of turns that fill a window varies.
            done = await socket.ask("question after question", max_output_tokens=30)
            return done["response"]["usage"]["input_tokens"]

        def n_deleted() -> int:
            return sum(e["type"] == "conversation.item.deleted" for e in socket.events)

        await socket.session(**NO_VAD, truncation=SMALL)
        for _ in range(20):
            await input_tokens()
            if n_deleted():
                break
        await socket.session(truncation="disabled")
        # The events of a turn's dropped items follow its response.done.
        n_before = n_deleted()
        assert n_before
        usage = [await input_tokens()]
        while usage[-1] <= LIMIT and len(usage) < 20:
            usage.append(await input_tokens())
        assert usage == sorted(usage) and usage[-1] > LIMIT
        assert n_deleted() == n_before


def said(text: str) -> dict:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


async def test_a_conversation_that_is_too_long_serves_its_next_small_turn(server):
    async with connected(server.ws) as socket:
        await socket.session(**NO_VAD)
        for n in range(100):
            await socket.send("conversation.item.create", item=said(f"item {n} of many"))
        done = await socket.ask("a question", max_output_tokens=10)
        assert is_whole(done), done
        await socket.session(truncation="disabled")
        long_ids = [f"long-{n}" for n in range(4)]
        for item_id in long_ids:
            item = said("long " * 9_000) | {"id": item_id}
            await socket.send("conversation.item.create", item=item)
        await socket.send("response.create", response={"output_modalities": ["text"]})
        failed = (await socket.until("response.done"))["response"]
        assert failed["status"] == "failed"
        assert failed["status_details"]["error"]["code"] == "context_length_exceeded"
        for item_id in long_ids:
            await socket.send("conversation.item.delete", item_id=item_id)
        done = await socket.ask("and now?", max_output_tokens=10)
        assert is_whole(done), done
