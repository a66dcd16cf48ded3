"""Messages of a chat mean the same to both variants of /v1/chat/completions, and to batches."""

import json
from typing import Any

import httpx
import msgspec
import pytest

from sglang_live.gateway.chat.messages import AudioUrlPart, Message, SpokenAnswers, read_messages
from sglang_live.gateway.errors import ClientEventError
from test.unit.gateway.fakes import FakeOrchestrator
from test.unit.gateway.http.test_chat import chunks_of
from test.unit.gateway.native.test_proxy import proxied

CHAT = "/v1/chat/completions"
HI = {"role": "user", "content": "My name is Emma."}
ASKED = {"role": "user", "content": "What is my name?"}
SPOKEN: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"voice": "ada"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
OUTPUT = {"role": "tool", "tool_call_id": "c1", "content": ""}

# Answers as servers, SDKs and their users' programs write them. "AUDIO" is an id of this server.
ANSWERS: dict[str, dict[str, Any]] = {
    "written": {"content": "Hello.", "reasoning_content": None, "tool_calls": None},
    "reasoned": {"content": "Hello.", "reasoning_content": "Emma greets me."},
    "empty": {"content": "", "reasoning_content": None, "tool_calls": None},
    "said nothing": {"content": None, "refusal": None},
    "dumped by an SDK": {
        **{"content": "Hello.", "refusal": None, "annotations": None, "audio": None},
        **{"function_call": None, "tool_calls": None, "reasoning_content": None},
    },
    "refused": {"content": None, "refusal": "I will not."},
    "in parts": {"content": [{"type": "text", "text": "A"}, {"type": "refusal", "refusal": "B"}]},
    "spoken": {
        **{"content": None, "refusal": None, "annotations": []},
        "audio": {"id": "AUDIO", "data": "UklGRg==", "transcript": "Hello.", "expires_at": 1},
    },
    "spoken, by id": {"audio": {"id": "AUDIO"}},
    "spoken, without audio": {"content": "Hello.", "audio": {"id": "AUDIO"}},
    "calling": {"content": None, "refusal": None, "tool_calls": [CALL]},
    "calling, from chunks": {"content": None, "tool_calls": [{**CALL, "index": 0}]},
    "calling without arguments": {
        "tool_calls": [{**CALL, "function": {"name": "look", "arguments": None}}]
    },
    "calling with words": {"content": "Wait.", "tool_calls": [CALL], "audio": None},
    "named": {"content": "Hello.", "name": "guide"},
}
# Faults, the code, and the path below the message.
FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown key": ({"content": "A", "mood": "good"}, "unknown_parameter", ".mood"),
    "unknown null": ({"content": "A", "mood": None}, "unknown_parameter", ".mood"),
    "unknown key of audio": (
        {"audio": {"id": "AUDIO", "rate": 1}},
        "unknown_parameter",
        ".audio.rate",
    ),
    "unknown audio": ({"audio": {"id": "audio_0"}}, "invalid_value", ".audio.id"),
    "no audio id": ({"audio": {"id": None}}, "invalid_type", ".audio.id"),
    "function of the past": (
        {"function_call": {"name": "look", "arguments": "{}"}},
        "invalid_type",
        ".function_call",
    ),
    "role": ({"role": "pirate", "content": "A"}, "invalid_value", ".role"),
    "name of a function": (
        {"tool_calls": [{**CALL, "function": {"name": "a b"}}]},
        "invalid_value",
        ".tool_calls[0].function.name",
    ),
    "arguments": (
        {"tool_calls": [{**CALL, "function": {"name": "look", "arguments": "{"}}]},
        "invalid_value",
        ".tool_calls[0].function.arguments",
    ),
    "output of no call": (
        {"role": "tool", "tool_call_id": "c9", "content": "A"},
        "invalid_tool_call_id",
        ".tool_call_id",
    ),
    "output without an id": (
        {"role": "tool", "content": "A"},
        "missing_required_parameter",
        ".tool_call_id",
    ),
    "calls of a user": (
        {"role": "user", "content": "A", "tool_calls": [CALL]},
        "invalid_value",
        ".tool_calls",
    ),
    "audio of a user": (
        {"role": "user", "content": "A", "audio": {"id": "AUDIO"}},
        "invalid_value",
        ".audio",
    ),
    "nothing": ({"role": "user", "content": ""}, "invalid_value", ".content"),
    "part": (
        {"role": "user", "content": [{"type": "file", "file": {}}]},
        "invalid_value",
        ".content[0].type",
    ),
    "sound of the assistant": (
        {"content": [{"type": "input_audio", "input_audio": {"data": "AAAA"}}]},
        "invalid_value",
        ".content[0].type",
    ),
    "number": ({"content": 5}, "invalid_type", ".content"),
}


async def spoken_before(http: httpx.AsyncClient) -> str:
    """Have the server speak once; returns the id of the audio."""
    response = await http.post(CHAT, json=SPOKEN | {"messages": [HI]})
    return response.json()["choices"][0]["message"]["audio"]["id"]


def with_id(message: dict[str, Any], audio_id: str) -> dict[str, Any]:
    return json.loads(json.dumps({"role": "assistant", **message}).replace("AUDIO", audio_id))


def history(message: dict[str, Any]) -> list[dict[str, Any]]:
    outputs = [OUTPUT] if message.get("tool_calls") else []
    return [HI, message, *outputs, ASKED]


async def test_an_answer_of_either_variant_is_accepted_by_both():
    async with proxied() as (http, _):
        audio_id = await spoken_before(http)
        for name, answer in ANSWERS.items():
            messages = history(with_id(answer, audio_id))
            spoken = await http.post(CHAT, json=SPOKEN | {"messages": messages})
            assert spoken.status_code == 200, (name, spoken.text)
            written = await http.post(CHAT, json={"messages": messages})
            assert written.status_code == 207, (name, written.text)


async def test_a_fault_has_the_same_error_on_both_variants():
    async with proxied() as (http, _):
        audio_id = await spoken_before(http)
        for name, (fault, code, path) in FAULTS.items():
            messages = [HI, with_id(fault, audio_id), ASKED]
            for fields in (SPOKEN, {}, {"modalities": ["text"]}):
                response = await http.post(CHAT, json=fields | {"messages": messages})
                error = response.json()["error"]
                assert response.status_code == 400, (name, fields)
                assert (error["code"], error["param"]) == (code, f"messages[1]{path}"), name


async def test_the_words_of_a_spoken_answer_reach_the_model_on_both_variants():
    orchestrator = FakeOrchestrator()
    async with proxied(orchestrator) as (http, sglang):
        audio_id = await spoken_before(http)
        messages = [HI, with_id(ANSWERS["spoken"], audio_id), ASKED]
        await http.post(CHAT, json=SPOKEN | {"messages": messages})
        await http.post(CHAT, json={"messages": messages})
    [turn] = orchestrator.turns
    assert [item.parts[0].text for item in turn.history] == [
        HI["content"],
        "All right.",
        ASKED["content"],
    ]
    sent = json.loads(sglang.requests[-1][2])["messages"]
    assert sent == [HI, {"role": "assistant", "content": "All right."}, ASKED]


async def test_chunks_of_a_spoken_answer_put_together_can_be_sent_again():
    async with proxied() as (http, _):
        fields = {"stream": True, "audio": {"voice": "ada", "format": "pcm16"}}
        chunks = chunks_of(await http.post(CHAT, json=SPOKEN | fields | {"messages": [HI]}))
        message: dict[str, Any] = {"audio": {}}
        for chunk in chunks:
            delta = chunk["choices"][0]["delta"]
            message["audio"] |= delta.pop("audio", {})
            message |= delta
        for fields in (SPOKEN, {}):
            response = await http.post(CHAT, json=fields | {"messages": [HI, message, ASKED]})
            assert response.status_code in (200, 207), response.text


def test_words_are_kept_until_they_expire():
    now_s = 1000.0
    answers = SpokenAnswers(lambda: now_s)
    expires_s = answers.keep("audio_1", "Hello.")
    assert answers.text("audio_1") == "Hello."
    now_s = float(expires_s)
    assert answers.text("audio_1") is None


def test_of_many_answers_the_oldest_are_forgotten():
    answers = SpokenAnswers()
    for n in range(1001):
        answers.keep(f"audio_{n}", "Hello.")
    assert answers.text("audio_0") is None
    assert answers.text("audio_1") == answers.text("audio_1000") == "Hello."


def test_pictures_are_for_routes_that_take_them():
    url = {"type": "audio_url", "audio_url": {"url": "https://example.com/a.wav"}}
    message = msgspec.convert({"role": "user", "content": [url]}, Message)
    assert read_messages([message], SpokenAnswers(), (AudioUrlPart,))
    with pytest.raises(ClientEventError) as refused:
        read_messages([message], SpokenAnswers())
    assert refused.value.param == "messages[0].content[0].type"


def test_all_texts_of_a_chat_together_are_bounded():
    long, short = (Message(role="user", content="x" * n) for n in (1 << 19, 1))
    assert len(read_messages([long, long], SpokenAnswers())) == 2
    with pytest.raises(ClientEventError) as refused:
        read_messages([long, long, short], SpokenAnswers())
    assert (refused.value.code, refused.value.param) == ("text_too_large", "messages")
