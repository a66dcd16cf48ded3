"""Claims about any order of events: one answer each, time goes on, and the end is clean."""

import asyncio
import base64
from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from test.unit.gateway.fakes import paced, spoken, voice
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


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS)
def test_each_event_has_its_answer_and_time_goes_on(steps):
    asyncio.run(_play(steps))


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
