"""Claims about any order of events: one answer each, time goes on, and the end is clean."""

import asyncio
import base64
from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from test.unit.gateway.fakes import done, paced, spoken, voice
from test.unit.gateway.live.test_sidebands import attached
from test.unit.gateway.live.world import LiveWorld, sound_of
from test.unit.gateway.realtime.playback_world import WORDS, interrupted_end

AUDIO = base64.b64encode(voice(120)).decode()
# By name: event, and how many events may answer it by its id.
COMMANDS = {
    "audio": ({"type": "session.input_audio.append", "audio": AUDIO}, {0}),
    "half": ({"type": "session.input_audio.append", "audio": "AA=="}, {1}),
    "mute": ({"type": "session.input_audio.mute"}, {1}),
    "unmute": ({"type": "session.input_audio.unmute"}, {1}),
    "think": ({"type": "session.thinking.append", "content": "x", "delegation_id": None}, {1}),
    "speak": ({"type": "session.commentary.append", "content": "x", "delegation_id": None}, {1}),
    "rule": ({"type": "session.instructions.append", "content": "x", "delegation_id": None}, {1}),
    "lost": ({"type": "session.thinking.append", "content": "x", "delegation_id": "no"}, {1}),
    # It plays, and has played unless the session closes before.
    "fixture": ({"type": "session.output_audio.fixture.play", "audio": AUDIO}, {1, 2}),
    "update": ({"type": "session.update", "session": {"delegation": {"type": "client"}}}, {1}),
    "start": ({"type": "session.start", "session": {"model": "fake-omni"}}, {1}),
    "create": ({"type": "response.create"}, {1}),
    "unknown": ({"type": "response.cancel"}, {1}),
}
STEPS = st.lists(
    st.sampled_from(sorted(COMMANDS)) | st.tuples(st.booleans(), st.integers(1, 12)), max_size=25
)
# The same for sessions that delegate. A decision is answered once: it is made, or it fails.
MESSAGE = {"role": "user", "content": "x"}
WORK = {
    "ask": ({"type": "response.item.create", "item": MESSAGE}, {0, 1}),
    "go": ({"type": "response.create"}, {0, 1}),
    "decide": ({"type": "decision.create"}, {0, 1}),
    "item": ({"type": "decision.item.create", "item": MESSAGE}, {1}),
    "gone": ({"type": "decision.item.delete", "item_id": "no"}, {1}),
    "mute": COMMANDS["mute"],
    "think": COMMANDS["think"],
    "speak": COMMANDS["speak"],
    "lost": COMMANDS["lost"],
    "audio": ({"type": "session.input_audio.append", "audio": AUDIO}, {0, 1}),
    "unknown": COMMANDS["unknown"],
}
QUESTION = {"type": "predicate", "instructions": "Yes?"}
TARGETS = (
    {"type": "responses", "responses": {"model": "fake-omni"}},
    {"type": "decisions", "decisions": {"model": "fake-omni", "questions": [QUESTION]}},
)
ASIDE = st.tuples(st.sampled_from(sorted(WORK)), st.booleans()) | st.integers(1, 6)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS)
def test_each_event_has_its_answer_and_time_goes_on(steps):
    asyncio.run(_play(steps))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(TARGETS), st.lists(ASIDE, max_size=20), st.booleans())
def test_events_of_two_sockets_have_their_answers(target, steps, ends_aside):
    asyncio.run(_play_aside(target, steps, ends_aside))


async def _play_aside(target, steps, ends_aside) -> None:
    """steps: ticks, or an event and whether the sideband sends it."""
    turn = [*spoken("Yes.", 400)[:-1], done(shares=(0.5, 0.5))]
    world = LiveWorld(*[turn] * 80)
    sent: dict[str, tuple[set[int], bool]] = {}
    n_ticks = 1
    async with world.connect(delegation=target) as client, attached(world) as aside:
        for n, step in enumerate(steps):
            if isinstance(step, int):
                await client.ticks(step)
                n_ticks += step
                continue
            (event, answers), is_aside = WORK[step[0]], step[1]
            sent[f"e{n}"] = answers, is_aside
            sender = aside if is_aside else client
            sender.send(event["type"], event_id=f"e{n}", **_fields(event))
            await client.rest()
        (aside if ends_aside else client).send("session.close", event_id="end")
        await client.rest()
        await aside.rest()
        assert len(sound_of(client.events)) == n_ticks
        for each in (client, aside):
            assert each.events[-1]["type"] == "session.closed"
            assert each.events[-1]["client_event_id"] == "end"
        for event_id, (answers, is_aside) in sent.items():
            mine, its = (
                [event for event in each.events if event.get("client_event_id") == event_id]
                for each in ((aside, client) if is_aside else (client, aside))
            )
            assert len(mine) in answers, (event_id, mine)
            # What is done is told to both, an error of the moment to who has made it.
            for event in mine:
                assert event["type"] == "error" or event["type"] in [e["type"] for e in its]


async def _play(steps) -> None:
    scripts = [paced(WORDS, 40) if n % 2 else spoken("Yes, of course.", 800) for n in range(40)]
    world = LiveWorld(*scripts)
    sent: dict[str, set[int]] = {}
    n_ticks = 1
    async with world.connect() as client:
        world.session.on_interrupt = [interrupted_end()]
        for n, step in enumerate(steps):
            if isinstance(step, str):
                event, answers = COMMANDS[step]
                sent[f"e{n}"] = answers
                client.send(event["type"], event_id=f"e{n}", **_fields(event))
                await client.rest()
            else:
                speaks, ticks = step
                await client.ticks(ticks, voice(100 * ticks) if speaks else bytes(4800))
                n_ticks += ticks
        client.send("session.close", event_id="end")
        await client.rest()
        assert len(sound_of(client.events)) == n_ticks
        answered = Counter(event.get("client_event_id") for event in client.events)
        assert answered.pop("end") == 1
        assert client.events[-1]["type"] == "session.closed"
        for event_id, answers in sent.items():
            assert answered[event_id] in answers, (event_id, steps)
    assert world.wire.closed == (1000, "close_requested")


def _fields(event: dict) -> dict:
    return {name: value for name, value in event.items() if name != "type"}
