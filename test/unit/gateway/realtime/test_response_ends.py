"""How a response ends when it does not simply complete, and what it leaves behind."""

import asyncio

import pytest

from sglang_live.core import AudioDelta, HistoryItem, TextPart, TranscriptDelta
from sglang_live.errors import StageFailedError
from sglang_live.gateway.call.conversation.assistant_item import AssistantItem
from sglang_live.gateway.call.conversation.conversation import Conversation, ItemBudget
from sglang_live.gateway.call.responses import turn_runner
from sglang_live.gateway.call.responses.plan import ResponsePlan
from sglang_live.gateway.call.responses.writer import ResponseWriter
from sglang_live.gateway.config import GatewayConfig
from sglang_live.gateway.realtime.server_events import RealtimePort
from sglang_live.gateway.realtime.session_config import first_config
from test.unit.gateway.fakes import FakeOrchestrator, connected, done, spoken, tone, types


async def test_a_client_cancel_ends_the_response_at_once_and_frees_the_turn():
    gate = asyncio.Event()
    orchestrator = FakeOrchestrator([[TranscriptDelta("Well, "), AudioDelta(tone(100)), gate]])
    async with connected(orchestrator) as client:
        client.send("response.create")
        await client.until("response.output_audio.delta")
        client.send("response.cancel")
        events = await client.until("response.done")
        assert types(events)[0] == "response.output_audio.done"
        response = events[-1]["response"]
        assert response["status"] == "cancelled"
        assert response["status_details"] == {"type": "cancelled", "reason": "client_cancelled"}
        assert response["output"][0]["status"] == "incomplete"
        assert await client.settle() == []
        assert orchestrator.session.n_cancelled == 1


async def test_cancelling_nothing_is_the_error_that_clients_ignore():
    async with connected(FakeOrchestrator()) as client:
        for fields in ({}, {"response_id": "resp_none"}):
            client.send("response.cancel", **fields)
            error = (await client.expect("error"))["error"]
            assert error["code"] == "response_cancel_not_active"
            assert error["message"].startswith("Cancellation failed")


async def test_a_turn_waits_until_the_cancelled_one_has_wound_down():
    gate, wind_down = asyncio.Event(), asyncio.Event()
    orchestrator = FakeOrchestrator([[gate], spoken("Second.")])
    async with connected(orchestrator) as client:
        orchestrator.session.wind_down = wind_down
        client.send("response.create")
        await client.expect("response.created")
        await client.settle()  # the first turn runs
        client.send("response.cancel")
        await client.expect("response.done")
        client.send("response.create")
        await client.expect("response.created")
        assert await client.settle() == []
        assert len(orchestrator.turns) == 1
        wind_down.set()
        assert (await client.find("response.done"))["response"]["status"] == "completed"
        assert len(orchestrator.turns) == 2


async def test_even_when_a_waiting_turn_was_cancelled_the_next_waits_for_the_first():
    gate, wind_down = asyncio.Event(), asyncio.Event()
    orchestrator = FakeOrchestrator([[gate], spoken("Third.")])
    async with connected(orchestrator) as client:
        orchestrator.session.wind_down = wind_down
        for _ in range(2):
            client.send("response.create")
            await client.expect("response.created")
            await client.settle()
            client.send("response.cancel")
            await client.expect("response.done")
        client.send("response.create")
        await client.expect("response.created")
        assert await client.settle() == []
        wind_down.set()
        assert (await client.find("response.done"))["response"]["status"] == "completed"


async def test_a_turn_that_never_winds_down_fails_the_next_instead_of_hanging_it(monkeypatch):
    monkeypatch.setattr(turn_runner, "_PREDECESSOR_S", 0.01)
    orchestrator = FakeOrchestrator([[asyncio.Event()]])
    async with connected(orchestrator) as client:
        orchestrator.session.wind_down = asyncio.Event()
        client.send("response.create")
        await client.expect("response.created")
        await client.settle()
        client.send("response.cancel")
        client.send("response.create")
        await client.until("response.created")
        failed = (await client.find("response.done"))["response"]
        assert failed["status_details"]["error"]["code"] == "deadline_exceeded"
        orchestrator.session.wind_down.set()


async def test_a_cancelled_response_leaves_what_was_sent_under_a_new_key():
    gate = asyncio.Event()
    steps = [TranscriptDelta("Once upon"), AudioDelta(tone(200)), gate]
    orchestrator = FakeOrchestrator([steps, spoken("Sorry.")])
    async with connected(orchestrator) as client:
        client.send("response.create")
        await client.until("response.output_audio.delta")
        client.send("response.cancel")
        await client.until("response.done")
        client.send("response.create")
        await client.until("response.done")
        (left,) = orchestrator.turns[1].history
        assert left.parts == (TextPart("Once upon"),)
        assert left.token_ids is None


@pytest.mark.parametrize("sent_before", [[], [TranscriptDelta("I "), AudioDelta(tone(40))]])
async def test_a_failing_turn_is_a_failed_response_and_the_session_goes_on(sent_before):
    orchestrator = FakeOrchestrator(
        [[*sent_before, StageFailedError("talker: bad batch")], spoken("Fine now.")]
    )
    async with connected(orchestrator) as client:
        client.send("response.create")
        response = (await client.find("response.done"))["response"]
        assert response["status"] == "failed"
        assert response["status_details"] == {
            "type": "failed",
            "error": {
                "type": "server_error",
                "code": "stage_failed",
                "message": "talker: bad batch",
            },
        }
        client.send("response.create")
        assert (await client.find("response.done"))["response"]["status"] == "completed"


@pytest.mark.parametrize("steps", [[RuntimeError("a bug")], [TranscriptDelta("half")]])
async def test_an_unexpected_error_is_a_failed_response_without_its_details(steps, caplog):
    async with connected(FakeOrchestrator([steps])) as client:
        client.send("response.create")
        response = (await client.find("response.done"))["response"]
        assert response["status"] == "failed"
        assert response["status_details"]["error"]["type"] == "server_error"
        assert "a bug" not in response["status_details"]["error"]["message"]
        await client.settle()
    assert "response=" in caplog.text


async def test_a_response_ended_by_the_token_limit_is_incomplete():
    end = done("So then", status="incomplete", reason="max_output_tokens")
    async with connected(FakeOrchestrator([[TranscriptDelta("So then"), end]])) as client:
        client.send("response.create")
        response = (await client.find("response.done"))["response"]
        assert response["status"] == "incomplete"
        assert response["status_details"]["reason"] == "max_output_tokens"
        assert response["output"][0]["status"] == "incomplete"


async def test_a_response_without_audio_or_text_still_enters_the_history():
    reply = HistoryItem(key="silent", role="assistant", parts=(), token_ids=(9,))
    orchestrator = FakeOrchestrator([[done(item=reply)]])
    async with connected(orchestrator) as client:
        client.send("response.create")
        await client.until("response.done")
        client.send("response.create")
        await client.until("response.done")
        assert [item.key for item in orchestrator.turns[1].history] == ["silent"]


@pytest.mark.parametrize("how", ["completes", "cancel", "leave", "interrupt"])
async def test_a_response_whose_item_id_was_reused_ends_as_any_other(how):
    """The client deleted the item during its turn, and created another of that id."""
    gate = asyncio.Event()
    steps = [TranscriptDelta("Well, "), AudioDelta(tone(2000)), gate, done("Well, ")]
    orchestrator = FakeOrchestrator([steps])
    async with connected(orchestrator) as client:
        client.send("response.create")
        item_id = (await client.find("response.output_item.added"))["item"]["id"]
        await client.find("response.output_audio.delta")
        client.send("conversation.item.delete", item_id=item_id)
        client.say("Mine.", item_id)
        await client.find("conversation.item.done")
        if how == "leave":
            return
        if how == "completes":
            gate.set()
        elif how == "cancel":
            client.send("response.cancel")
        else:
            client.append(tone(600))
        events = await client.until("response.done")
        assert "conversation.item.truncated" not in types(events + await client.settle())
        client.send("response.create")
        assert (await client.find("response.done"))["response"]["status"] == "completed"
        assert [seen.parts[0].text for seen in orchestrator.turns[-1].history][:1] == ["Mine."]


def test_a_response_that_fails_to_close_is_over_all_the_same(monkeypatch):
    def crash(self, item):
        raise ValueError("a bug")

    emitted = []
    config = first_config(FakeOrchestrator(), GatewayConfig())
    plan = ResponsePlan(config=config, decided_at_s=0.0)
    port = RealtimePort(lambda kind, **_: emitted.append(kind))
    writer = ResponseWriter(plan, Conversation(1000, ItemBudget(1000)), port)
    writer.add_transcript("Well")
    monkeypatch.setattr(Conversation, "id_before", crash)
    with pytest.raises(ValueError):
        writer.cancel("client_cancelled")
    assert writer.done and emitted[-1] == "response.done"


def test_the_text_of_an_item_is_not_in_its_repr():
    item = AssistantItem("item_1", "audio", text="A secret.")
    item.set_end(done("A secret."))
    item.close("completed")
    assert "secret" not in repr(item)
