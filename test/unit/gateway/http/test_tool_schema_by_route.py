"""A table of every parameter of OpenAI's API on each HTTP route, and its outcome.

HONOURED has an effect. REFUSED is a 400 that names it. ACCEPTED has no effect on a response,
by the protocol itself (`user`) or because the value is neutral (`n: 1`).
"""

import dataclasses
import json
import re
from typing import Any

import httpx
import pytest
from openai.types.audio.speech_create_params import SpeechCreateParams
from openai.types.audio.transcription_create_params import TranscriptionCreateParamsNonStreaming
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from typing_extensions import get_type_hints

from test.unit.gateway.fakes import MODEL, FakeOrchestrator, app_of
from test.unit.gateway.native.test_proxy import proxied

from .test_transcription import file_of, writes

# Ids, times, and what depends on them.
_CHANGING = re.compile(r"(chatcmpl|audio|call|key)_\w+|'key': '\w+'|\"(created|expires_at)\":\d+")
CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/speech"
TRANSCRIPTION = "/v1/audio/transcriptions"
HI = {"role": "user", "content": "Hi."}
TOOL = {"type": "function", "function": {"name": "look", "strict": True}}
SPOKEN = {"messages": [HI], "modalities": ["text", "audio"]}
HONOURED, ACCEPTED, REFUSED = "honoured", "accepted", "refused"

CHAT_TABLE: dict[str, dict[str, list[Any]]] = {
    "messages": {HONOURED: [[{"role": "user", "content": "Yo."}]], REFUSED: [[], "Hi."]},
    "model": {ACCEPTED: [MODEL, "default", None], REFUSED: ["gpt-5", "", 5]},
    "audio": {
        HONOURED: [{"format": "mp3"}, {"voice": "bob"}, {"voice": {"id": "BOB"}}],
        ACCEPTED: [None, {"voice": "alloy"}, {"voice": None}],
        REFUSED: [{"format": "amr"}, {"voice": "nora"}, {"voice": ""}, {"voice": {"id": "v_1"}}],
    },
    "modalities": {ACCEPTED: [["audio"]], REFUSED: [["audio", "video"]]},
    "max_tokens": {HONOURED: [5], REFUSED: [0, 5000]},
    "max_completion_tokens": {HONOURED: [5], REFUSED: [0, 5000]},
    "temperature": {HONOURED: [0, 2], REFUSED: [-1, 2.1]},
    "seed": {HONOURED: [7, -7], REFUSED: [1 << 63, 1 << 70]},
    "tools": {HONOURED: [[TOOL]], REFUSED: [[TOOL, TOOL], [{"type": "custom", "custom": {}}]]},
    "tool_choice": {ACCEPTED: ["auto", "none"], REFUSED: ["required", {"type": "allowed_tools"}]},
    "parallel_tool_calls": {ACCEPTED: [True, False]},
    "stream": {HONOURED: [True], ACCEPTED: [False], REFUSED: ["yes"]},
    "stream_options": {REFUSED: [{"include_usage": True}, {"no_such_key": 1}]},
    "n": {ACCEPTED: [1], REFUSED: [2]},
    "frequency_penalty": {ACCEPTED: [0], REFUSED: [0.5]},
    "presence_penalty": {ACCEPTED: [0], REFUSED: [0.5]},
    "top_p": {ACCEPTED: [1], REFUSED: [0.5]},
    "logprobs": {ACCEPTED: [False], REFUSED: [True]},
    "top_logprobs": {ACCEPTED: [0], REFUSED: [5]},
    "logit_bias": {ACCEPTED: [{}], REFUSED: [{"5": 100}]},
    "stop": {ACCEPTED: [[]], REFUSED: ["x", ["x", "y"]]},
    "store": {ACCEPTED: [False], REFUSED: [True]},
    "response_format": {ACCEPTED: [{"type": "text"}], REFUSED: [{"type": "json_object"}]},
    "reasoning_effort": {ACCEPTED: ["none"], REFUSED: ["high"]},
    "verbosity": {ACCEPTED: ["medium"], REFUSED: ["low"]},
    "functions": {ACCEPTED: [[]], REFUSED: [[{"name": "look"}]]},
    "function_call": {REFUSED: ["auto", {"name": "look"}]},
    "prediction": {REFUSED: [{"type": "content", "content": "x"}]},
    "moderation": {REFUSED: [{"model": "x"}]},
    "web_search_options": {REFUSED: [{}]},
    "metadata": {ACCEPTED: [{"a": "b"}]},
    "user": {ACCEPTED: ["u"]},
    "safety_identifier": {ACCEPTED: ["u"]},
    "prompt_cache_key": {ACCEPTED: ["k"]},
    "prompt_cache_options": {ACCEPTED: [{"mode": "implicit"}]},
    "prompt_cache_retention": {ACCEPTED: ["24h"]},
    "service_tier": {HONOURED: ["flex", "auto"], REFUSED: ["fast", 1]},
    "no_such_key": {REFUSED: [None, 1]},
    "top_k": {REFUSED: [5]},
    "use_audio_in_video": {ACCEPTED: [False], REFUSED: [True, 1]},
    "mm_processor_kwargs": {REFUSED: [{"use_audio_in_video": True}]},
}
SPEECH_TABLE: dict[str, dict[str, list[Any]]] = {
    "input": {HONOURED: ["Yo."], REFUSED: ["", " ", 5]},
    "model": {ACCEPTED: [MODEL, "default", None], REFUSED: ["gpt-5", "", 5]},
    "voice": {
        HONOURED: ["bob", {"id": "BOB"}],
        ACCEPTED: ["alloy", {"id": "nova"}, None],
        REFUSED: ["nora", "", {"id": ""}, {"id": "voice_1"}, 5],
    },
    "response_format": {HONOURED: ["wav"], ACCEPTED: [None], REFUSED: ["amr", "", 1]},
    "stream_format": {HONOURED: ["sse"], ACCEPTED: [None], REFUSED: ["words", ""]},
    "speed": {HONOURED: [0.5], ACCEPTED: [1.0, None], REFUSED: [4.1, 0, "fast"]},
    "service_tier": {HONOURED: ["flex"], ACCEPTED: ["auto"], REFUSED: ["fast", 1]},
    "instructions": {ACCEPTED: ["", None], REFUSED: ["Whisper."]},
    "no_such_key": {REFUSED: [1]},
    "language": {REFUSED: ["de"]},
}
TRANSCRIPTION_TABLE: dict[str, dict[str, list[Any]]] = {
    "file": {},
    "model": {ACCEPTED: [MODEL, "default"], REFUSED: ["whisper-1", ""]},
    "language": {HONOURED: ["de"], ACCEPTED: [""], REFUSED: ["d" * 513]},
    "prompt": {HONOURED: ["Regen"], ACCEPTED: [""], REFUSED: ["x" * 16_385]},
    "response_format": {HONOURED: ["text", "srt"], REFUSED: ["diarized_json", ""]},
    "temperature": {HONOURED: ["0.5"], REFUSED: ["3", "warm", ""]},
    "stream": {HONOURED: ["true", "True", "1"], ACCEPTED: ["false", "0"], REFUSED: ["yes", ""]},
    "chunking_strategy": {ACCEPTED: ["auto"], REFUSED: ["server_vad"]},
    "chunking_strategy[type]": {REFUSED: ["server_vad"]},
    "include": {REFUSED: ["logprobs"]},
    "include[]": {REFUSED: ["logprobs"]},
    "keywords": {REFUSED: ["rain"]},
    "known_speaker_names": {REFUSED: ["Ada"]},
    "known_speaker_references": {REFUSED: ["data:"]},
    "languages": {REFUSED: ["de"]},
    "timestamp_granularities": {REFUSED: ["word"]},
    "timestamp_granularities[]": {REFUSED: ["word"]},
    "no_such_key": {REFUSED: ["1"]},
}


def cases(table: dict[str, dict[str, list[Any]]]) -> list[tuple[str, str, Any]]:
    return [
        (name, outcome, value)
        for name, outcomes in table.items()
        for outcome, values in outcomes.items()
        for value in values
    ]


def check(response: httpx.Response, name: str, outcome: str, value: Any) -> None:
    if outcome != REFUSED:
        assert response.status_code == 200, (name, value, response.text)
        return
    assert response.status_code == (404 if name == "model" and value != 5 else 400), (name, value)
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].split(".")[0].split("[")[0] == name.split("[")[0], (value, error)


def effect(orchestrator: FakeOrchestrator, response: httpx.Response) -> str:
    """All that a client and the stages see, without ids and times."""
    turns = [dataclasses.asdict(turn) for turn in orchestrator.turns]
    text = f"{response.headers.get('content-type')} {response.text} {turns}"
    return _CHANGING.sub("", text)


async def check_effect(
    path: str, base: dict[str, Any], name: str, outcome: str, value: Any
) -> None:
    """An honoured value changes something; one that is accepted has the effect of no value."""
    told = []
    for body in (base, base | {name: value}):
        orchestrator = FakeOrchestrator()
        told.append(effect(orchestrator, await post(path, orchestrator, json=body)))
    assert (told[0] != told[1]) == (outcome == HONOURED), (name, value)


async def post(path: str, orchestrator: FakeOrchestrator, **request: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app_of(orchestrator))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        return await http.post(path, **request)


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        (CHAT_TABLE, CompletionCreateParamsNonStreaming),
        (SPEECH_TABLE, SpeechCreateParams),
        (TRANSCRIPTION_TABLE, TranscriptionCreateParamsNonStreaming),
    ],
)
def test_no_parameter_of_openais_types_is_missing_in_the_table(table, kind):
    assert set(get_type_hints(kind)) <= table.keys()


@pytest.mark.parametrize(("name", "outcome", "value"), cases(CHAT_TABLE))
async def test_spoken_chat(name, outcome, value):
    check(await post(CHAT, FakeOrchestrator(), json=SPOKEN | {name: value}), name, outcome, value)
    if outcome != REFUSED:
        more = {"audio": {"format": "pcm16"}} if name == "stream" else {}
        await check_effect(CHAT, SPOKEN | more, name, outcome, value)


async def test_written_chat():
    """What SGLang gets differs, or the parameter is refused, or it changes nothing by protocol."""
    base = {"messages": [HI]}
    async with proxied() as (http, sglang):

        async def sent(**more: Any) -> tuple[httpx.Response, str]:
            response = await http.post(CHAT, json=base | more)
            if response.status_code != 207:
                return response, ""
            body = json.loads(sglang.requests[-1][2])
            del body["rid"]
            return response, json.dumps(body)

        _, nothing = await sent()
        for name, outcome, value in cases(CHAT_TABLE):
            if name == "modalities":  # it chooses the variant
                continue
            response, body = await sent(**{name: value})
            if response.status_code == 207:
                is_tier = "x-service-tier" in response.headers
                assert body != nothing or is_tier or outcome == ACCEPTED, (name, value)
                assert name != "no_such_key"
            else:
                error = response.json()["error"]
                assert error["param"].split(".")[0].split("[")[0] == name, (value, error)
                assert outcome != ACCEPTED or value is not None, (name, value, error)
                if name in get_type_hints(CompletionCreateParamsNonStreaming):
                    assert error["code"] != "unknown_parameter" or "." in error["param"], error


async def test_a_value_of_a_wrong_type_has_the_same_error_on_both_variants_of_chat():
    names = ("model", "messages", "temperature", "max_tokens", "n", "seed", "stream", "tools")
    async with proxied() as (http, _):
        for name in (*names, "tool_choice", "service_tier", "stream_options"):
            for value in ([1], {"a": 1}, True, 1.5, "\u0001"):
                errors = []
                for base in (SPOKEN, {"messages": [HI]}):
                    response = await http.post(CHAT, json=base | {name: value})
                    if response.status_code in (400, 404):
                        errors.append(response.json()["error"])
                if len(errors) == 2:
                    [(code, at), (same, there)] = [(e["code"], e["param"]) for e in errors]
                    assert (code, at) == (same, there), (name, value)


@pytest.mark.parametrize(("name", "outcome", "value"), cases(SPEECH_TABLE))
async def test_speech(name, outcome, value):
    body = {"input": "Hi.", name: value}
    check(await post(SPEECH, FakeOrchestrator(), json=body), name, outcome, value)
    if outcome != REFUSED:
        await check_effect(SPEECH, {"input": "Hi."}, name, outcome, value)


@pytest.mark.parametrize(("name", "outcome", "value"), cases(TRANSCRIPTION_TABLE))
async def test_transcription(name, outcome, value):
    files = {"file": ("said.wav", file_of())}
    response = await post(TRANSCRIPTION, writes("x"), data={name: value}, files=files)
    check(response, name, outcome, value)


async def test_honoured_parameters_reach_the_turn():
    orchestrator = FakeOrchestrator()
    fields = {"max_tokens": 5, "temperature": 0.5, "seed": 7, "audio": {"voice": "bob"}}
    await post(CHAT, orchestrator, json=SPOKEN | fields)
    [turn] = orchestrator.turns
    assert (turn.max_output_tokens, turn.temperature, turn.seed) == (5, 0.5, 7)
    assert (turn.voice, turn.wants_audio) == ("bob", True)
    assert not turn.flex and turn.is_timely


@pytest.mark.parametrize(("path", "body"), [(CHAT, SPOKEN), (SPEECH, {"input": "Hi."})])
async def test_flex_requests_are_not_timely(path, body):
    orchestrator = FakeOrchestrator()
    await post(path, orchestrator, json=body | {"service_tier": "flex"})
    [turn] = orchestrator.turns
    assert turn.flex and not turn.is_timely


@pytest.mark.parametrize("path", [CHAT, SPEECH, "/v1/realtime/client_secrets"])
async def test_a_parameter_in_the_url_is_refused_by_name(path):
    body = SPOKEN if path == CHAT else {"input": "Hi."} if path == SPEECH else {}
    response = await post(f"{path}?voice=bob", FakeOrchestrator(), json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "voice")


@pytest.mark.parametrize("path", [CHAT, SPEECH, "/v1/realtime/client_secrets"])
async def test_the_error_names_half_of_a_surrogate_pair(path):
    body = {
        CHAT: SPOKEN | {"messages": [{"role": "user", "content": "a\ud800"}]},
        SPEECH: {"input": "\udc00"},
    }.get(path, {"session": {"type": "realtime", "instructions": "\ud83d"}})
    response = await post(path, FakeOrchestrator(), content=json.dumps(body))
    error = response.json()["error"]
    assert response.status_code == 400
    assert "surrogate" in error["message"]
    assert error["param"] in ("messages[0].content", "input", "session.instructions")


CALLED = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "tool", "content": "x", "tool_call_id": "c1"}], "messages[1].tool_call_id"),
        ([{"role": "tool", "content": "x"}], "messages[1].tool_call_id"),
        (
            [
                {"role": "assistant", "tool_calls": [CALLED]},
                {"role": "tool", "content": "x", "tool_call_id": "c2"},
            ],
            "messages[2].tool_call_id",
        ),
        (
            [{"role": "assistant", "tool_calls": [{**CALLED, "function": {"name": "a b"}}]}],
            "messages[1].tool_calls[0].function.name",
        ),
        (
            [
                {
                    "role": "assistant",
                    "tool_calls": [{**CALLED, "function": {"name": "a", "arguments": "{"}}],
                }
            ],
            "messages[1].tool_calls[0].function.arguments",
        ),
        ([{"role": "user", "tool_calls": [CALLED]}], "messages[1].tool_calls"),
        ([{"role": "user", "content": "x", "mood": "good"}], "messages[1].mood"),
    ],
)
async def test_the_error_names_function_calls_and_outputs_that_do_not_fit(messages, param):
    body = SPOKEN | {"messages": [HI, *messages], "tools": [TOOL]}
    response = await post(CHAT, FakeOrchestrator(), json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_completion_can_be_sent_again():
    orchestrator = FakeOrchestrator()
    transport = httpx.ASGITransport(app_of(orchestrator))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        first = (await http.post(CHAT, json=SPOKEN)).json()["choices"][0]["message"]
        response = await http.post(CHAT, json=SPOKEN | {"messages": [HI, first, HI]})
    assert response.status_code == 200, response.text
