"""session.created and session.update: settings that are echoed, merged, refused."""

import pytest

from sglang_live.gateway.realtime.events import TurnDetectionForm
from sglang_live.gateway.realtime.turn_detection import detection_json, merge_turn_detection
from sglang_live.interaction.vad import TurnDetection, VadSettings
from test.unit.gateway.fakes import MODEL, FakeOrchestrator, connected, tone

SERVER_VAD = {
    "type": "server_vad",
    "threshold": 0.5,
    "prefix_padding_ms": 300,
    "silence_duration_ms": 500,
    "idle_timeout_ms": None,
    "create_response": True,
    "interrupt_response": True,
}


async def updated(client, **session):
    client.update(**session)
    return (await client.expect("session.updated"))["session"]


async def refused(client, **session):
    client.send("session.update", event_id="mine", session=session)
    error = (await client.expect("error"))["error"]
    assert error["event_id"] == "mine"
    assert error["type"] == "invalid_request_error"
    return error


async def test_a_new_session_has_the_documented_defaults():
    async with connected(FakeOrchestrator(), default_instructions="Be brief.") as client:
        session = await updated(client)
        assert session["id"].startswith("sess_")
        assert session["object"] == "realtime.session"
        assert session["model"] == MODEL
        assert session["output_modalities"] == ["audio"]
        assert session["instructions"] == "Be brief."
        assert session["max_output_tokens"] == "inf"
        assert session["audio"]["input"]["turn_detection"] == SERVER_VAD
        assert session["audio"]["input"]["format"] == {"type": "audio/pcm", "rate": 24000}
        assert session["audio"]["output"]["format"] == {"type": "audio/pcm", "rate": 24000}
        assert session["audio"]["output"]["voice"] == "ada"


async def test_an_update_changes_only_the_keys_it_names():
    async with connected(FakeOrchestrator()) as client:
        await updated(client, instructions="Speak like a sailor.", max_output_tokens=100)
        detection = {"type": "server_vad", "threshold": 0.8}
        await updated(client, audio={"input": {"turn_detection": detection}})
        session = await updated(
            client, audio={"input": {"turn_detection": {"silence_duration_ms": 200}}}
        )
        assert session["instructions"] == "Speak like a sailor."
        assert session["max_output_tokens"] == 100
        changed = {"threshold": 0.8, "silence_duration_ms": 200}
        assert session["audio"]["input"]["turn_detection"] == SERVER_VAD | changed


async def test_null_switches_off_and_empty_values_clear():
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    async with connected(FakeOrchestrator(), default_instructions="Be brief.") as client:
        session = await updated(client, tools=[tool], tool_choice="required")
        assert session["tools"] == [tool]
        session = await updated(
            client,
            instructions="",
            tools=[],
            tool_choice=None,
            audio={"input": {"turn_detection": None, "transcription": None}},
        )
        assert session["instructions"] == ""
        assert session["tools"] == []
        assert session["tool_choice"] == "auto"
        assert session["audio"]["input"]["turn_detection"] is None
        # Switched on again, it has its default settings.
        session = await updated(client, audio={"input": {"turn_detection": {}}})
        assert session["audio"]["input"]["turn_detection"] == SERVER_VAD


async def test_semantic_vad_is_echoed_in_its_own_form():
    detection = {"type": "semantic_vad", "interrupt_response": False}
    async with connected(FakeOrchestrator()) as client:
        session = await updated(client, audio={"input": {"turn_detection": detection}})
        assert session["audio"]["input"]["turn_detection"] == {
            "type": "semantic_vad",
            "eagerness": "auto",
            "create_response": True,
            "interrupt_response": False,
        }


@pytest.mark.parametrize("kind", ["server_vad", "semantic_vad"])
@pytest.mark.parametrize(
    ("key", "value", "default"),
    [
        ("confirm_ms", 0, 250),
        ("ignore_echo", False, True),
        ("ignore_backchannels", False, True),
        ("ignore_side_talk", False, True),
    ],
)
async def test_an_extension_is_echoed_only_to_clients_that_have_set_it(kind, key, value, default):
    async with connected(FakeOrchestrator()) as client:

        async def detection(**keys):
            session = await updated(client, audio={"input": {"turn_detection": keys}})
            return session["audio"]["input"]["turn_detection"]

        assert key not in await detection(type=kind)
        assert (await detection(**{key: value}))[key] == value
        # Other keys do not change it, and null restores the default.
        assert (await detection(create_response=True))[key] == value
        assert (await detection(**{key: None}))[key] == default


async def test_settings_that_clients_always_send_are_accepted_and_echoed_in_the_strict_form():
    async with connected(FakeOrchestrator()) as client:
        session = await updated(
            client,
            model="gpt-realtime",
            tracing="auto",
            truncation="auto",
            prompt=None,
            include=None,
            reasoning=None,
            parallel_tool_calls=True,
            audio={
                "input": {
                    "noise_reduction": None,
                    "transcription": {"model": "whisper-1", "delay": None, "keywords": []},
                    "turn_detection": {"type": "semantic_vad", "eagerness": "medium"},
                },
                "output": {"voice": "marin", "speed": 1.0},
            },
        )
        assert session["model"] == MODEL
        assert session["audio"]["output"]["voice"] == "marin"
        assert session["audio"]["input"]["transcription"] == {"model": "whisper-1"}


async def test_a_transcriber_outside_the_protocol_is_not_echoed():
    async with connected(FakeOrchestrator()) as client:
        wish = {"model": "default", "language": "de"}
        client.update(audio={"input": {"transcription": wish}})
        session = (await client.expect("session.updated"))["session"]
        assert session["audio"]["input"]["transcription"] == {"language": "de"}


async def test_a_voice_of_openai_selects_the_models_default_voice():
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator) as client:
        for voice in ("marin", "bob"):
            await updated(client, audio={"output": {"voice": voice}})
            client.send("response.create", response={"output_modalities": ["text"]})
            response = (await client.find("response.done"))["response"]
            assert response["audio"]["output"]["voice"] == voice
        assert [turn.voice for turn in orchestrator.turns] == ["ada", "bob"]


async def test_the_voice_is_fixed_after_the_first_audio_but_equal_values_are_accepted():
    async with connected(FakeOrchestrator()) as client:
        await updated(client, audio={"output": {"voice": "ash"}})
        client.send("response.create")
        await client.until("response.done")
        error = await refused(client, type="realtime", audio={"output": {"voice": "bob"}})
        assert error["code"] == "cannot_update_voice"
        session = await updated(client, audio={"output": {"voice": "ash"}})
        assert session["audio"]["output"]["voice"] == "ash"


@pytest.mark.parametrize(
    ("session", "code", "param"),
    [
        ({}, "missing_required_parameter", "session.type"),
        ({"type": "transcription"}, "unsupported_session_type", "session.type"),
        ({"type": "realtime", "output_modalities": ["audio", "text"]}, "invalid_value", None),
        ({"type": "realtime", "max_output_tokens": 0}, "invalid_value", None),
        ({"type": "realtime", "max_output_tokens": "many"}, "invalid_value", None),
        ({"type": "realtime", "instructions": 7}, "invalid_type", "session.instructions"),
        ({"type": "realtime", "tools": [{"type": "mcp"}]}, "invalid_value", None),
        ({"type": "realtime", "tools": [{"type": "function"}]}, "invalid_value", None),
        ({"type": "realtime", "tool_choice": "sometimes"}, "invalid_value", None),
        (
            {"type": "realtime", "audio": {"input": {"turn_detection": {"threshold": 2}}}},
            "invalid_value",
            "session.audio.input.turn_detection.threshold",
        ),
        (
            {"type": "realtime", "audio": {"input": {"turn_detection": {"confirm_ms": 2001}}}},
            "invalid_value",
            "session.audio.input.turn_detection.confirm_ms",
        ),
        (
            {"type": "realtime", "audio": {"input": {"turn_detection": {"type": "psychic"}}}},
            "invalid_value",
            "session.audio.input.turn_detection.type",
        ),
        (
            {"type": "realtime", "audio": {"input": {"format": {"type": "audio/opus"}}}},
            "invalid_value",
            "session.audio.input.format.type",
        ),
        (
            {
                "type": "realtime",
                "audio": {"output": {"format": {"type": "audio/pcm", "rate": 48000}}},
            },
            "invalid_value",
            "session.audio.output.format.rate",
        ),
    ],
)
async def test_an_invalid_update_is_one_error_and_changes_nothing(session, code, param):
    async with connected(FakeOrchestrator()) as client:
        before = await updated(client)
        # A valid key of the same event must not be applied either.
        error = await refused(client, **{"temperature": 0.5, "instructions": "new", **session})
        assert error["code"] == code
        if param:
            assert error["param"] == param
        assert await updated(client) == before


async def test_a_tool_too_deep_to_echo_is_refused_when_it_arrives():
    deep: dict = {}
    for _ in range(260):
        deep = {"properties": deep}
    tool = {"type": "function", "name": "deep", "parameters": deep}
    async with connected(FakeOrchestrator()) as client:
        error = await refused(client, type="realtime", tools=[tool])
        assert error["param"] == "session.tools[0]"
        assert (await updated(client))["tools"] == []


async def test_a_new_input_format_holds_from_the_next_append():
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator) as client:
        client.turn_detection(None)
        client.append(tone(200))
        client.update(audio={"input": {"format": {"type": "audio/pcmu"}}})
        client.append(bytes([0xFF]) * 1600)  # 200 ms of mu-law silence
        client.send("input_audio_buffer.commit")
        client.send("response.create")
        await client.until("response.done")
        (part,) = orchestrator.turns[0].history[0].parts
        assert part.duration_s == pytest.approx(0.4)
        assert abs(part.pcm[800:2400]).max() > 4000
        assert abs(part.pcm[3600:]).max() < 100


def test_idle_timeout_ms_has_an_effect_with_server_vad_only():
    merged = merge_turn_detection(
        TurnDetectionForm(type="semantic_vad", idle_timeout_ms=5000),
        None,
        TurnDetection(vad=VadSettings()),
    )
    assert merged.idle_timeout_ms is None
    assert "idle_timeout_ms" not in detection_json(merged)


async def test_a_recogniser_refuses_transcription_settings_that_it_does_not_heed():
    async with connected(FakeOrchestrator(), recognises=True) as client:
        for name, value in (("language", "de"), ("prompt", "Regen")):
            client.update(audio={"input": {"transcription": {name: value}}})
            error = (await client.expect("error"))["error"]
            assert error["code"] == "unsupported_parameter"
            assert error["param"] == f"session.audio.input.transcription.{name}"
        await updated(client, audio={"input": {"transcription": {"model": "whisper-1"}}})
