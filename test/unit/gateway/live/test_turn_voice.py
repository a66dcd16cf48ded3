"""Claims about what the application appends, and what the model delegates to it."""

import asyncio

from sglang_live.errors import StageFailedError
from test.unit.gateway.fakes import done, paced, spoken, voice
from test.unit.gateway.live.world import (
    HEARD,
    SAID,
    LiveWorld,
    errors,
    spoken_ticks,
    text_of,
)
from test.unit.gateway.realtime.playback_world import interrupted_end
from test.unit.gateway.realtime.test_input_transcription import written

CALL = done(function_calls=('{"name": "delegate", "arguments": {}}',))
COMMENTARY, THINKING = "session.commentary.append", "session.thinking.append"
INSTRUCTIONS = "session.instructions.append"


def add(client, kind: str, content: str, delegation_id: str | None = None, **fields) -> None:
    client.send(kind, content=content, delegation_id=delegation_id, **fields)


def turns(world) -> list:
    """Those of the conversation; the others write transcripts."""
    return [turn for turn in world.session.turns if not turn.stateless]


def texts(turn) -> list[tuple[str, str]]:
    return [(item.role, item.parts[0].text) for item in turn.history if item.role != "user"]


async def test_commentary_is_spoken_at_once_in_silence_without_any_audio_of_the_client():
    world = LiveWorld(spoken("Welcome.", 400))
    async with world.connect() as client:
        add(client, COMMENTARY, "Greet the user.", event_id="c1")
        await client.ticks(10)
        assert spoken_ticks(client.events)[0] <= 2
        assert text_of(client.events) == "Welcome."
        [appended] = client.of("session.commentary.appended")
        assert appended["client_event_id"] == "c1"
        assert (appended["end_ms"] - appended["start_ms"]) in (100, 200)
        [turn] = turns(world)
        [(role, text)] = texts(turn)
        assert role == "system" and text.endswith("Greet the user.")


async def test_commentary_waits_while_the_user_speaks_and_is_known_to_the_answer():
    world = LiveWorld(spoken("It rains.", 400))
    async with world.connect() as client:
        await client.ticks(5, voice(500))
        add(client, COMMENTARY, "Rain has begun.")
        add(client, COMMENTARY, "It is cold.")
        await client.ticks(10, voice(1000))
        assert not turns(world)
        await client.ticks(40, bytes(4800))
        [turn] = turns(world)
        assert [item.role for item in turn.history] == ["system", "system", "user"]
        assert text_of(client.events) == "It rains."


async def test_commentary_waits_for_the_end_of_speech_and_three_are_one_turn():
    world = LiveWorld(spoken("First.", 800), spoken("Second.", 800))
    async with world.connect() as client:
        add(client, COMMENTARY, "One.")
        await client.ticks(4)
        for content in ("Two.", "Three.", "Four."):
            add(client, COMMENTARY, content)
        await client.ticks(40)
        first, second = turns(world)
        assert len(texts(first)) == 1 and len(texts(second)) == 5
        ticks = spoken_ticks(client.events)
        assert len(ticks) == 16 and ticks == sorted(ticks)


async def test_thinking_and_instructions_are_never_spoken():
    world = LiveWorld(spoken("Yes.", 400))
    async with world.connect() as client:
        add(client, THINKING, "The user is Ann.")
        add(client, INSTRUCTIONS, "Be formal.")
        await client.ticks(30)
        assert not turns(world) and not spoken_ticks(client.events)
        await client.ticks(40, voice(1000))
        [turn] = turns(world)
        known = texts(turn)
        assert known[0][1].endswith("The user is Ann.") and known[1] == ("system", "Be formal.")


async def test_instructions_outlast_what_leaves_a_full_conversation():
    world = LiveWorld(spoken("Yes.", 400), max_conversation_bytes=2000)
    async with world.connect() as client:
        add(client, INSTRUCTIONS, "Be formal.")
        for n in range(30):
            add(client, THINKING, f"{n}:" + "x" * 200)
        await client.ticks(3)
        add(client, COMMENTARY, "Go.")
        await client.ticks(3)
        [turn] = turns(world)
        known = [text for _, text in texts(turn)]
        assert known.count("Be formal.") == 1
        assert len(known) < 15 and not any(" 0:x" in text for text in known)


async def test_appends_are_acknowledged_in_order_and_in_time():
    world = LiveWorld()
    async with world.connect() as client:
        await client.ticks(4)
        add(client, THINKING, "a", event_id="1")
        add(client, INSTRUCTIONS, "b", event_id="2")
        await client.ticks(4)
        appended = [e for e in client.events if e["type"].endswith(".appended")]
        assert [event["client_event_id"] for event in appended] == ["1", "2"]
        assert all(event["end_ms"] % 200 == 0 for event in appended)


async def test_appends_are_refused_during_a_fixture():
    world = LiveWorld()
    async with world.connect() as client:
        client.send("session.output_audio.fixture.play", audio="AAAA" * 4000)
        add(client, THINKING, "x")
        client.send("session.output_audio.fixture.play", audio="AAAA" * 4000)
        await client.rest()
        assert [error["code"] for error in errors(client.events)] == ["fixture_active"] * 2
        await client.ticks(6)
        add(client, THINKING, "x")
        await client.ticks(3)
        assert len(client.of("session.thinking.appended")) == 1


async def test_the_application_does_what_the_model_delegates():
    said = [*spoken("Let me look.", 400)[:-1], CALL]
    world = LiveWorld(said, spoken("It is ten.", 400))
    async with world.connect() as client:
        add(client, COMMENTARY, "Find out the time.")
        await client.ticks(15)
        [created] = client.of("session.delegation.created")
        delegation = created["delegation"]
        assert (delegation["type"], delegation["target"]) == ("delegation", "client")
        assert 0 <= created["offset_ms"] <= 500
        assert text_of(client.events) == "Let me look."
        add(client, THINKING, "The clock is found.", delegation["id"])
        await client.ticks(10)
        assert len(turns(world)) == 1
        add(client, COMMENTARY, "It is 10:00.", delegation["id"])
        await client.ticks(15)
        assert text_of(client.events) == "Let me look. It is ten."
        roles = [role for role, _ in texts(turns(world)[-1])]
        assert roles == ["system", "assistant", "tool", "system"]


async def test_a_delegation_comes_after_the_words_that_it_is_about():
    world = LiveWorld([*spoken("Let me look.", 400)[:-1], CALL], written("What is the time?"))
    async with world.connect() as client:
        await client.ticks(40, voice(1000))
        [heard] = client.of(HEARD)
        [created] = client.of("session.delegation.created")
        assert heard["delta"] == "What is the time?"
        assert client.events.index(heard) < client.events.index(created)


async def test_a_delegation_does_not_wait_long_for_words():
    world = LiveWorld([*spoken("Let me look.", 400)[:-1], CALL], [asyncio.Event()])
    async with world.connect() as client:
        await client.ticks(30, voice(1000))
        assert not client.of("session.delegation.created")
        await client.ticks(30, bytes(4800))
        assert len(client.of("session.delegation.created")) == 1


async def test_a_delegation_without_a_word_is_acknowledged_after_its_delay():
    world = LiveWorld([CALL], spoken("One moment.", 400), spoken("Ten.", 400))
    delegation = {"type": "client", "acknowledgement_delay_ms": 500}
    async with world.connect(delegation=delegation) as client:
        add(client, COMMENTARY, "Find out the time.")
        await client.ticks(5)
        assert len(client.of("session.delegation.created")) == 1
        assert not spoken_ticks(client.events)
        await client.ticks(15)
        assert text_of(client.events) == "One moment."


async def test_a_result_comes_before_its_acknowledgement():
    world = LiveWorld([CALL], spoken("Ten.", 400))
    delegation = {"type": "client", "acknowledgement_delay_ms": 500}
    async with world.connect(delegation=delegation) as client:
        add(client, COMMENTARY, "Find out the time.")
        await client.ticks(3)
        [created] = client.of("session.delegation.created")
        add(client, COMMENTARY, "It is 10:00.", created["delegation"]["id"])
        await client.ticks(30)
        assert text_of(client.events) == "Ten."
        assert len(turns(world)) == 2


async def test_an_acknowledgement_delegates_nothing():
    world = LiveWorld([CALL], [CALL], spoken("More.", 400))
    async with world.connect() as client:
        add(client, COMMENTARY, "Find out the time.")
        await client.ticks(30)
        assert len(client.of("session.delegation.created")) == 1
        assert len(turns(world)) == 2


async def test_an_interruption_cancels_no_work():
    words = "one two three four five six seven eight nine ten"
    world = LiveWorld(
        [CALL], paced(words, 60, asyncio.Event()), spoken("Yes.", 400), spoken("Ten.", 400)
    )
    async with world.connect() as client:
        add(client, COMMENTARY, "Find out the time.")
        await client.ticks(15)
        [created] = client.of("session.delegation.created")
        world.session.on_interrupt = [interrupted_end()]
        world.orchestrator.scripts.insert(0, spoken("Yes.", 400))
        await client.ticks(40, voice(1000))
        add(client, COMMENTARY, "It is 10:00.", created["delegation"]["id"])
        await client.ticks(20)
        assert not errors(client.events)
        assert client.of(SAID)
        assert any(role == "tool" for role, _ in texts(turns(world)[-1]))


async def test_a_turn_that_fails_is_told_and_the_session_goes_on():
    world = LiveWorld([StageFailedError("gone")], spoken("Yes.", 400))
    async with world.connect() as client:
        add(client, COMMENTARY, "Go.")
        await client.ticks(5)
        [error] = errors(client.events)
        assert error["type"] == "server_error" and "client_event_id" not in error
        add(client, COMMENTARY, "Go on.")
        await client.ticks(15)
        assert text_of(client.events) == "Yes."


async def test_a_model_that_follows_no_instructions_is_given_words_to_say():
    scripts = [spoken("It is ten.", 400)]
    world = LiveWorld([CALL], *scripts, follows_instructions=False)
    async with world.connect() as client:
        add(client, COMMENTARY, "Find out.")
        await client.ticks(8)  # no acknowledgement: it could not be told of what
        [created] = client.of("session.delegation.created")
        delegation_id = created["delegation"]["id"]
        add(client, THINKING, "It is late.", delegation_id)
        add(client, COMMENTARY, "It is ten.", delegation_id)
        await client.ticks(15)
    [_, told] = turns(world)
    assert [
        (item.role, item.parts[0].text) for item in told.history if item.role != "assistant"
    ] == [
        ("tool", "Find out."),
        ("system", "For your information, not to be said aloud: It is late."),
        ("tool", "It is ten."),
    ]
