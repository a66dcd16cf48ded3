"""Claims about questions that are answered with the model's probabilities."""

import asyncio

import pytest

from sglang_live.errors import OptionsAlikeError, StageFailedError
from test.unit.gateway.fakes import done
from test.unit.gateway.live.test_backend import LOOK, ask
from test.unit.gateway.live.world import LiveWorld, errors, text_of

PREDICATE = {"type": "predicate", "name": "rude", "instructions": "Is the user rude?"}
CHOICE = {
    "type": "choice",
    "instructions": [
        {"type": "input_text", "text": "What is wanted?"},
        {"type": "input_json", "data": {"shop": 3}},
    ],
    "choices": [{"value": "order", "description": "buys"}, {"value": True}, {"value": "True"}],
}
SCORE = {
    "type": "score",
    "instructions": "How content?",
    "levels": [{"label": "not"}, {"label": "a bit"}, {"label": "very"}],
}
QUESTIONS = [PREDICATE, CHOICE, SCORE]
DELEGATION = {"type": "decisions", "decisions": {"model": "gpt-6-luna", "questions": QUESTIONS}}


def shares(*each: float) -> list:
    return [done(shares=each)]


# Of the choice's options two begin alike.
ANSWERS = (
    shares(0.75, 0.25),
    [StageFailedError("alike", reason=OptionsAlikeError.code)],
    shares(0.125, 0.75, 0.125),
    shares(0.25, 0.25, 0.5),
)


async def test_each_kind_of_question_has_its_answer_in_order():
    world = LiveWorld(*ANSWERS)
    async with world.connect(delegation=DELEGATION) as client:
        client.send("decision.create", event_id="d1")
        await client.ticks(2)
        [event] = client.of("decision.event")
        assert event["client_event_id"] == "d1" and "delegation_id" not in event
        decision = event["event"]["decision"]
        predicate, choice, score = decision["answers"]
        assert predicate == {"type": "predicate", "name": "rude", "probability": 0.75}
        assert (choice["choice"], choice["confidence"], choice["name"]) == (True, 0.75, None)
        assert choice["probabilities"] == [
            {"value": "order", "probability": 0.125},
            {"value": True, "probability": 0.75},
            {"value": "True", "probability": 0.125},
        ]
        assert (score["score"], score["confidence"]) == (1.25, 0.5)
        assert [level["value"] for level in score["probabilities"]] == [0, 1, 2]
        assert decision["model"] == "gpt-6-luna"
        assert decision["usage"]["total_tokens"] == 45
        turns = world.session.turns
        assert [turn.options for turn in turns] == [
            ("Yes", "No"),
            ("order", "True", "True"),
            ("A", "B", "C"),
            ("not", "a bit", "very"),
        ]
        assert all(turn.stateless and not turn.wants_audio for turn in turns)
        first, asked = turns[1].history[-1], turns[2].history[-1]
        assert "- order (buys)" in first.parts[0].text.splitlines()
        assert asked.role == "user"
        for line in ("What is wanted?", '{"shop":3}', "A: order (buys)", "B: True", "C: True"):
            assert line in asked.parts[0].text.splitlines()


async def test_what_the_voice_delegates_is_decided():
    world = LiveWorld(LOOK, *ANSWERS)
    async with world.connect(delegation=DELEGATION) as client:
        ask(client)
        await client.ticks(20)
        [created] = client.of("session.delegation.created")
        delegation = created["delegation"]
        assert delegation["target"] == "decisions" and "response_id" not in delegation
        [event] = client.of("decision.event")
        assert event["delegation_id"] == delegation["id"]
        assert text_of(client.events) == "Let me look."
        seen = [(item.role, item.parts[0].text) for item in world.session.turns[1].history]
        assert [role for role, _ in seen] == ["system", "assistant", "user"]
        assert seen[1][1] == "Let me look."


async def test_items_are_read_by_later_decisions_until_they_are_deleted():
    world = LiveWorld(*ANSWERS, *ANSWERS)
    async with world.connect(delegation=DELEGATION) as client:
        for item in (
            {"role": "user", "content": "I am a guest."},
            {"role": "developer", "content": [{"type": "input_json", "data": [{"a": 1}]}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "rain"},
            {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "d", "output": "snow", "id": "mine"},
        ):
            client.send("decision.item.create", item=item, event_id="made")
        client.send("decision.create", event_id="first")
        await client.ticks(1)
        created = client.of("decision.item.created")
        assert len({event["item"]["id"] for event in created}) == 6
        assert created[-1]["item"]["id"] == "mine"
        assert {event["client_event_id"] for event in created} == {"made"}
        roles = [item.role for item in world.session.turns[0].history]
        assert roles == ["user", "system", "assistant", "tool", "assistant", "tool", "user"]
        for event in created:
            client.send("decision.item.delete", item_id=event["item"]["id"])
        client.send("decision.item.delete", item_id="mine", event_id="again")
        client.send("decision.create", event_id="second")
        await client.ticks(1)
        assert len(client.of("decision.item.deleted")) == 6
        assert [e["client_event_id"] for e in errors(client.events)] == ["again"]
        assert len(world.session.turns[4].history) == 1


async def test_an_event_id_is_used_once():
    world = LiveWorld(*ANSWERS)
    async with world.connect(delegation=DELEGATION) as client:
        client.send("decision.create", event_id="d")
        client.send("decision.create", event_id="d")
        await client.ticks(1)
        [error] = errors(client.events)
        assert (error["code"], error["param"]) == ("duplicate_event_id", "event_id")
        assert len(client.of("decision.event")) == 1


async def test_a_decision_that_fails_is_told_to_its_event():
    world = LiveWorld([StageFailedError("gone")], *ANSWERS)
    async with world.connect(delegation=DELEGATION) as client:
        client.send("decision.create", event_id="d")
        client.send("decision.create", event_id="e")
        await client.ticks(1)
        [error] = errors(client.events)
        assert (error["message"], error["client_event_id"]) == ("gone", "d")
        [event] = client.of("decision.event")
        assert event["client_event_id"] == "e"


async def test_decisions_and_items_are_bounded():
    world = LiveWorld([asyncio.Event()])
    async with world.connect(delegation=DELEGATION) as client:
        for n in range(6):
            client.send("decision.create", event_id=f"d{n}")
            await client.rest()
        assert [error["code"] for error in errors(client.events)] == ["too_many_decisions"]
        for item in (
            {"role": "user", "content": "x" * 33_000},
            {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
            {"type": "computer_call"},
            {"type": "function_call", "name": "f"},
        ):
            client.send("decision.item.create", item=item)
        await client.rest()
        assert [(error["code"], error["param"]) for error in errors(client.events)[1:]] == [
            ("decision_items_full", "item"),
            ("invalid_value", "item.content[0].type"),
            ("unsupported_parameter", "item.type"),
            ("missing_required_parameter", "item.call_id"),
        ]
        client.send("session.close")
        await client.rest()
        assert client.events[-1]["type"] == "session.closed"


async def test_questions_are_echoed_and_replaced_as_a_whole():
    world = LiveWorld(shares(0.5, 0.5))
    async with world.connect(delegation=DELEGATION) as client:
        shown = client.of("session.started")[0]["session"]["delegation"]
        assert shown["acknowledgement_delay_ms"] == 400
        assert [one["type"] for one in shown["decisions"]["questions"]] == [
            *("predicate", "choice", "score"),
        ]
        form = {"type": "decisions", "decisions": {"questions": [PREDICATE]}}
        client.send("session.update", session={"delegation": form})
        client.send("decision.create", event_id="d")
        await client.ticks(1)
        shown = client.of("session.updated")[0]["session"]["delegation"]
        assert shown["decisions"]["model"] == "gpt-6-luna"
        assert shown["acknowledgement_delay_ms"] == 400
        assert len(client.of("decision.event")[0]["event"]["decision"]["answers"]) == 1
        client.send("session.update", session={"delegation": None})
        client.send("response.create")
        client.send("session.thinking.append", content="x", delegation_id="call_1")
        await client.rest()
        codes = [error["code"] for error in errors(client.events)]
        assert codes == ["immutable_field_update", "unsupported_event", "invalid_value"]


def question(**changes) -> dict:
    return {"model": "gpt-6-luna", "questions": [{**CHOICE, **changes}]}


@pytest.mark.parametrize(
    "form,code,param",
    [
        (None, "missing_required_parameter", ".model"),
        ({"questions": QUESTIONS}, "missing_required_parameter", ".model"),
        ({"model": "gpt-6-luna"}, "missing_required_parameter", ".questions"),
        ({"model": "other", "questions": QUESTIONS}, "model_not_found", ".model"),
        ({"model": "gpt-6-luna", "questions": []}, "invalid_value", ".questions"),
        (question(type="draw"), "invalid_value", ".questions[0].type"),
        (question(choices=[{"value": "a"}]), "invalid_value", ".questions[0].choices"),
        (question(choices=[{"value": "a"}] * 2), "invalid_value", ".questions[0].choices"),
        (question(choices=[{"value": str(n)} for n in range(53)]), "invalid_value",
         ".questions[0].choices"),
        (question(depth=1), "unknown_parameter", ".questions[0].depth"),
        (question(instructions=[{"type": "input_image"}]), "invalid_value",
         ".questions[0].instructions[0].type"),
    ],
)  # fmt: skip
async def test_what_cannot_be_decided_is_refused_at_the_start(form, code, param):
    world = LiveWorld()
    delegation = {"type": "decisions"} | ({} if form is None else {"decisions": form})
    async with world.connect(delegation=delegation) as client:
        [error] = errors(client.events)
        assert (error["code"], error["param"]) == (code, f"session.delegation.decisions{param}")
