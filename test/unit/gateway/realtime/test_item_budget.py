"""The limit on the items of all conversations together."""

import pytest

from sglang_live.gateway.call.responses.responses import Responses
from sglang_live.gateway.call.turns.input_transcription import InputTranscription
from sglang_live.gateway.call.turns.turn_taking import TurnTaking
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


@pytest.mark.parametrize("part", [TurnTaking, InputTranscription, Responses])
async def test_a_session_frees_its_items_whatever_fails_at_its_end(monkeypatch, part):
    async def fail(self) -> None:
        raise RuntimeError("at the end")

    orchestrator = FakeOrchestrator()
    shared = services(orchestrator)
    monkeypatch.setattr(part, "close", fail)
    with pytest.raises(RuntimeError, match="at the end"):
        async with connected(orchestrator, shared=shared) as client:
            client.send("conversation.item.create", item=message("a" * 900))
            await client.until("conversation.item.done")
            assert shared.item_budget.used_bytes == 900
    assert shared.item_budget.used_bytes == 0
    assert orchestrator.session.n_closed == 1
