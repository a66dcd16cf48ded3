"""Claims about the states of a Live session, and what it refuses before it starts."""

import asyncio

import pytest

from sglang_live.gateway.call.link import IdleSessionError
from sglang_live.gateway.draining import CLOSE_SERVICE_RESTART
from sglang_live.gateway.live.route import live_link
from test.unit.gateway.fakes import full, spoken, types, voice
from test.unit.gateway.live.world import AUDIO, LiveClient, LiveWorld, errors, spoken_ticks

WEATHER = {"type": "function", "name": "weather", "parameters": {}}


async def test_a_session_shows_its_settings_and_those_of_the_server():
    world = LiveWorld()
    before = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"text": "Hi"}], "id": "x"},
        {"role": "assistant", "content": [{"type": "text", "text": "Yes?"}]},
    ]
    client_settings = {
        "model": "gpt-live-1",
        "instructions": "You are Ada.",
        "audio": {"output": {"voice": "bob"}},
        "input": before,
        "safety_identifier": "s",
        "store": False,
        "delegation": {"type": "client", "acknowledgement_delay_ms": 250},
    }
    async with world.connect(begins=False) as client:
        client.send("session.start", event_id="a", session=client_settings)
        await client.rest()
        started = client.events[0]
        assert started["client_event_id"] == "a"
        session = started["session"]
        assert session.pop("id").startswith("live_")
        assert session.pop("expires_at") > 1_700_000_000
        assert session == {
            "status": "active",
            "model": "fake-omni",
            "instructions": "You are Ada.",
            "audio": {
                "format": {"type": "audio/pcm", "rate": 24_000},
                "output": {"voice": "bob"},
            },
            "delegation": {"type": "client", "acknowledgement_delay_ms": 250},
            "input": [
                {
                    "type": "message",
                    "role": role,
                    "content": [{"type": kind, "text": text}],
                }
                for role, kind, text in (
                    ("developer", "input_text", "Be brief."),
                    ("user", "input_text", "Hi"),
                    ("assistant", "output_text", "Yes?"),
                )
            ],
            "store": False,
            "triggers": [],
            "safety_identifier": "s",
        }
        await client.ticks(40, voice(1000))
        [turn] = [turn for turn in world.session.turns if not turn.stateless]
        assert turn.voice == "bob" and turn.instructions == "You are Ada."
        assert [item.role for item in turn.history] == ["system", "user", "assistant", "user"]
        assert '"delegate"' in turn.tools.functions[0]


@pytest.mark.parametrize(
    ("settings", "code", "param"),
    [
        ({"modle": "x"}, "unknown_parameter", "session.modle"),
        ({"model": None}, "invalid_type", "session.model"),
        ({"model": "other"}, "model_not_found", "session.model"),
        ({"audio": {"input": {}}}, "unknown_parameter", "session.audio.input"),
        (
            {"audio": {"format": {"type": "audio/pcm", "rate": 48_000}}},
            "invalid_value",
            "session.audio.format.rate",
        ),
        (
            {"audio": {"format": {"type": "audio/opus", "rate": 48_000}}},
            "invalid_value",
            "session.audio.format.type",
        ),
        (
            {"audio": {"format": {"type": "audio/pcm"}}},
            "missing_required_parameter",
            "session.audio.format.rate",
        ),
        (
            {"audio": {"output": {"voice": "nemo"}}},
            "invalid_value",
            "session.audio.output.voice",
        ),
        (
            {"audio": {"output": {"voice": {"id": "voice_1"}}}},
            "invalid_value",
            "session.audio.output.voice",
        ),
        (
            {"delegation": {"type": "responses", "responses": {"model": "m"}}},
            "model_not_found",
            "session.delegation.responses.model",
        ),
        (
            {"delegation": {"type": "responses", "responses": {}}},
            "missing_required_parameter",
            "session.delegation.responses.model",
        ),
        (
            {"delegation": {"type": "responses"}},
            "missing_required_parameter",
            "session.delegation.responses",
        ),
        (
            {
                "delegation": {
                    "type": "responses",
                    "responses": {"model": "gpt-5.6-luna", "tools": [{"type": "web_search"}]},
                }
            },
            "invalid_value",
            "session.delegation.responses.tools[0].type",
        ),
        (
            {
                "delegation": {
                    "type": "responses",
                    "responses": {"model": "gpt-5.6-luna", "temperature": 1},
                }
            },
            "unknown_parameter",
            "session.delegation.responses.temperature",
        ),
        (
            {
                "delegation": {
                    "type": "responses",
                    "responses": {"model": "gpt-5.6-luna", "max_output_tokens": 8},
                }
            },
            "invalid_value",
            "session.delegation.responses.max_output_tokens",
        ),
        (
            {"delegation": {"type": "decisions", "decisions": {"model": "m"}}},
            "missing_required_parameter",
            "session.delegation.decisions.questions",
        ),
        ({"delegation": {"type": "me"}}, "invalid_value", "session.delegation.type"),
        (
            {"delegation": {"type": "client", "tools": [WEATHER]}},
            "unknown_parameter",
            "session.delegation.tools",
        ),
        ({"store": True}, "unsupported_parameter", "session.store"),
        ({"triggers": [{"type": "decisions"}]}, "unsupported_parameter", "session.triggers"),
        ({"client": {"data_channel": {}}}, "unsupported_parameter", "session.client"),
        ({"idle_timeout_s": 10}, "unsupported_parameter", "session.idle_timeout_s"),
        ({"wake_policy": {"type": "speech"}}, "unsupported_parameter", "session.wake_policy"),
        (
            {"input": [{"role": "system", "content": [{"text": "x"}]}]},
            "invalid_value",
            "session.input[0].role",
        ),
        (
            {"input": [{"role": "user", "content": []}]},
            "invalid_value",
            "session.input[0].content",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "output_text", "text": "x"}]}]},
            "invalid_value",
            "session.input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"text": "x"}]}] * 129},
            "invalid_value",
            "session.input",
        ),
    ],
)
async def test_what_is_not_honoured_is_refused_before_the_start(settings, code, param):
    world = LiveWorld()
    async with world.connect(begins=False) as client:
        client.send("session.start", event_id="mine", session={"model": "fake-omni", **settings})
        await client.rest()
        [error] = client.events
        assert error["type"] == "error" and error["client_event_id"] == "mine"
        body = error["error"]
        assert (body["code"], body["param"]) == (code, param)
        assert body["client_event_id"] == "mine"
        assert body["type"] == "invalid_request_error"
    assert world.wire.closed == (1008, code)
    assert world.session.turns == []


async def test_too_long_instructions_and_history_are_refused():
    for settings, param in (
        ({"instructions": "x" * 900}, "session.instructions"),
        (
            {"input": [{"role": "user", "content": [{"text": "x" * 2000}]}]},
            "session.input",
        ),
    ):
        world = LiveWorld()
        world.orchestrator.most_tokens = 1000
        async with world.connect(**settings) as client:
            [error] = errors(client.events)
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert world.wire.closed[0] == 1008


@pytest.mark.parametrize(
    "frame",
    [
        '{"type": "session.input_audio.append", "audio": ""}',
        '{"type": "session.close"}',
        '{"type": "session.start"}',
        "{",
        "[]",
        '{"type": "x"}',
    ],
)
async def test_anything_but_a_start_ends_the_connection(frame):
    world = LiveWorld()
    async with world.connect(begins=False) as client:
        client.send_raw(frame)
        await client.rest()
        assert types(client.events) == ["error"]
    assert world.wire.closed[0] == 1008


async def test_the_server_is_silent_until_the_start_and_waits_for_it_only_so_long():
    world = LiveWorld()
    async with world.connect(begins=False) as client:
        await client.ticks(140)
        assert client.events == []
        await client.ticks(15)
        assert [error["code"] for error in errors(client.events)] == ["session_start_timeout"]
    assert world.wire.closed == (1008, "session_start_timeout")


async def test_a_second_start_changes_nothing():
    world = LiveWorld()
    async with world.connect() as client:
        client.begin(instructions="other")
        await client.ticks(3)
        assert [error["code"] for error in errors(client.events)] == ["session_already_started"]
        assert len(client.of(AUDIO)) == 4


async def test_an_update_changes_the_delay_alone():
    world = LiveWorld()
    async with world.connect() as client:
        for form in (
            {"delegation": {"type": "client", "acknowledgement_delay_ms": 700}},
            {"delegation": {"type": "client"}},
            {"delegation": None, "triggers": []},
            {},
        ):
            client.send("session.update", session=form)
            await client.rest()
            shown = client.of("session.updated")[-1]["session"]["delegation"]
            assert shown["acknowledgement_delay_ms"] == 700
        for form, code, param in (
            (
                {"delegation": {"type": "responses", "responses": {}}},
                "immutable_field_update",
                "session.delegation.type",
            ),
            ({"instructions": "x"}, "unknown_parameter", "session.instructions"),
            ({"triggers": [{}]}, "unsupported_parameter", "session.triggers"),
        ):
            client.send("session.update", session=form)
            await client.rest()
            error = errors(client.events)[-1]
            assert (error["code"], error["param"]) == (code, param)
        assert len(client.of("session.updated")) == 4


async def test_a_session_closes_while_it_speaks_and_fails_late_appends():
    world = LiveWorld(spoken("A long story.", 4000))
    async with world.connect() as client:
        client.send("session.commentary.append", content="Go.", delegation_id=None)
        await client.ticks(10)
        assert spoken_ticks(client.events)
        client.send("session.thinking.append", content="x", delegation_id=None, event_id="late")
        client.send("session.close", event_id="end")
        client.send("session.close", event_id="again")
        await client.rest()
        assert types(client.events[-2:]) == ["error", "session.closed"]
        [error] = errors(client.events)
        assert error["code"] == "context_injection_incomplete"
        assert error["client_event_id"] == "late"
    assert world.wire.closed == (1000, "close_requested")


async def test_an_idle_session_is_closed_as_expired():
    world = LiveWorld(idle_session_s=5.0)
    async with world.connect() as client:
        await client.ticks(80)
        closed = client.of("session.closed")
        assert [event["reason"] for event in closed] == ["expired"]
    assert world.wire.closed == (1000, IdleSessionError.code)


async def test_a_restart_of_the_server_is_no_clean_end():
    world = LiveWorld()
    async with world.connect() as client:
        world.shared.drain.began.set()
        await client.rest()
        await asyncio.sleep(0.05)
    assert client.of("session.closed") == []
    assert world.wire.closed[0] == CLOSE_SERVICE_RESTART


async def test_a_full_server_says_so():
    world = LiveWorld()
    world.orchestrator.refuse_with = full()
    serving = asyncio.create_task(live_link(world.wire, world.shared, world.sessions).run())
    client = LiveClient(world.wire, world)
    await client.rest()
    [error] = errors(client.events)
    assert error["type"] == "server_error"
    await serving
    assert world.wire.closed[0] == 1013


@pytest.mark.parametrize("where", ["speech.Speech.take", "turn_voice.TurnVoice.hear"])
async def test_a_bug_in_a_tick_ends_the_session(monkeypatch, caplog, where):
    world = LiveWorld()
    monkeypatch.setattr(f"sglang_live.gateway.live.{where}", lambda self, n: 1 / 0)
    async with world.connect() as client:
        client.append(bytes(4800))
        await client.ticks(2)
        assert errors(client.events)[-1]["type"] == "server_error"
    assert world.wire.closed[0] == 1011
    assert "task_failed" in caplog.text
