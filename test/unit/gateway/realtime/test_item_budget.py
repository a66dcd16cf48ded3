"""The limit on the items of all conversations together."""

from test.unit.gateway.fakes import FakeOrchestrator, connected, services


def message(text: str) -> dict:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


async def test_a_full_server_refuses_items_until_another_session_closes():
    first = FakeOrchestrator()
    shared = services(first, max_conversation_bytes_of_all=1000)
    async with connected(first, shared=shared) as client:
        client.send("conversation.item.create", item=message("a" * 900))
        await client.until("conversation.item.done")
        client.send("conversation.item.create", item=message("b" * 200))
        error = (await client.until("error"))[-1]["error"]
        assert error["code"] == "server_overloaded" and "1000" in error["message"]
        client.send("conversation.item.create", item=message("c"))
        client.send("response.create")
        assert (await client.until("response.done"))[-1]["response"]["status"] == "completed"
    assert shared.item_budget.used_bytes == 0
