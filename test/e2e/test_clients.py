"""Unmodified third-party clients: text, speech, function calls, interruption and reconnection.

A client runs all parts in one process (clients/), through relays that record events. The model
calls no functions by itself, so in that part its text is scripted; gateway, socket and client are
real.
"""

import json
import shutil
import ssl
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from test.e2e.conftest import Server
from test.e2e.relay import DELTA, TRANSCRIPT, Line, Relay, certificate
from test.e2e.socket_client import clip_24k
from test.e2e.test_examples import EXAMPLES, PYTHON, ROOT, run
from test.e2e.together import Together
from test.protocol.ga_events import events
from test.unit.gateway.fakes import FakeOrchestrator, app_of, done, spoken
from test.unit.gateway.http.test_unknown_parameters import try_out_types, try_out_unknown_keys
from test.unit.gateway.live_server import listening
from test.unit.gateway.test_every_setting import check_fields

pytestmark = [pytest.mark.e2e]

CLIENTS = Path(__file__).parent / "clients"
NAMES = (
    "openai_blocking.py",
    "openai_async.py",
    "openai_agents.py",
    "pipecat_bot.py",
    "livekit_agent.py",
    "openai_js.mjs",
)
PARTS = ("text", "speech", "tool", "interruption", "reconnect")
# Of these, a function call is forced as well; the model makes it, with a grammar.
FORCING = ("openai_blocking.py", "openai_async.py", "livekit_agent.py")
CALL = '{"name": "weather", "arguments": {"town": "Rome"}}'
# The demo model's responses end at random, but greedy ones rarely.
LONG = {"temperature": 0}
RAIN = "It rains in Rome."
DONE = "response.done"
CUT = "conversation.item.truncated"


@dataclass
class Played:
    """One part of one client.

    told: the client's report.
    lines: its connections, in order.
    """

    told: dict[str, Any]
    lines: list[Line]

    @property
    def line(self) -> Line:
        return self.lines[-1]


@pytest.fixture(scope="module")
def plays(server, tmp_path_factory) -> Together[str, dict[str, Played]]:
    """The parts of every client."""
    return Together(NAMES, lambda name: play(name, server, tmp_path_factory.mktemp("client")))


@pytest.fixture(params=NAMES)
def played(request, plays) -> dict[str, Played]:
    """All parts of one client."""
    return plays[request.param]


async def play(name: str, server: Server, directory: Path) -> dict[str, Played]:
    real, scripted = f"127.0.0.1:{server.port}", [[done(function_calls=(CALL,))], spoken(RAIN, 400)]
    async with AsyncExitStack() as open_:
        gateway = app_of(FakeOrchestrator(scripted, model_name="demo"))
        fake = await open_.enter_async_context(listening(gateway))
        relays = {
            part: Relay(fake if part == "tool" else real, breaks=part == "reconnect")
            for part in (*PARTS, *(["forced"] if name in FORCING else []))
        }
        tls, scheme, environment = None, "http", {}
        if name.endswith(".mjs"):  # the SDK uses TLS only
            cert, key = certificate(directory)
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            tls.load_cert_chain(cert, key)
            scheme, environment = "https", {"NODE_EXTRA_CA_CERTS": str(cert)}
        urls = {
            part: f"{scheme}://{await open_.enter_async_context(relay.listening(tls))}"
            for part, relay in relays.items()
        }
        command = command_of(name, directory)
        recording = directory / "said.pcm"
        recording.write_bytes(clip_24k("sp_librivox_0880.flac").tobytes())
        keys = (key_to(server, max_output_tokens=3), key_to(server, **LONG))
        arguments = (json.dumps(urls), recording, *keys)
        printed = await run(*command, *arguments, cwd=directory, within_s=300, **environment)
    told = [json.loads(line) for line in printed.splitlines() if line.startswith('{"part"')]
    return {each["part"]: Played(each, relays[each["part"]].lines) for each in told}


def command_of(name: str, directory: Path) -> tuple[str | Path, ...]:
    if not name.endswith(".mjs"):
        return (PYTHON, CLIENTS / name)
    # Node searches packages beside the script.
    (directory / "node_modules").symlink_to(EXAMPLES / "node_modules")
    return ("node", shutil.copy(CLIENTS / name, directory))


def key_to(server: Server, **session: Any) -> str:
    """A client secret whose sessions begin with these settings."""
    form = {"session": {"type": "realtime", **session}}
    answer = httpx.post(f"{server.http}/v1/realtime/client_secrets", json=form)
    return answer.raise_for_status().json()["value"]


def part(played: dict[str, Played], name: str) -> Played:
    """A part that ran to its end without a protocol fault."""
    assert "failed" not in played[name].told, played[name].told["failed"]
    for line in played[name].lines:
        assert not line.faults
        # The response ended before the client could interrupt it.
        codes = {event["error"]["code"] for event in line.of_type("error")}
        assert codes <= {"response_cancel_not_active"}
    return played[name]


def sound_ms(line: Line, response_id: str) -> float:
    deltas = [e["delta"] for e in line.of_type(DELTA) if e["response_id"] == response_id]
    return sum(len(delta) * 3 / 4 - delta.count("=") for delta in deltas) / 48


def words(line: Line, response_id: str) -> str:
    said = [e["delta"] for e in line.of_type(TRANSCRIPT) if e["response_id"] == response_id]
    return "".join(said)


def check_heard(told: dict[str, Any], line: Line) -> None:
    """Check that the client has the last response of the server, in transcript and audio."""
    response = line.of_type(DONE)[-1]["response"]
    assert response["status"] in ("completed", "incomplete")
    assert told["sound_s"] * 1000 == pytest.approx(sound_ms(line, response["id"]), abs=100)
    assert told["sound_s"] > 0
    if "text" in told:
        assert told["text"].strip() == words(line, response["id"]).strip() != ""


def test_typed_text_gets_a_response(played):
    text = part(played, "text")
    [asked] = [e["item"] for e in text.line.asked if e["type"] == "conversation.item.create"]
    assert asked["content"][0]["text"] == "What is the weather in Rome?"
    check_heard(text.told, text.line)


def test_speech_gets_a_response(played):
    speech = part(played, "speech")
    [turn] = speech.line.of_type("input_audio_buffer.committed")
    assert "conversation.item.create" not in {event["type"] for event in speech.line.asked}
    check_heard(speech.told, speech.line)
    assert speech.line.when(turn) < speech.line.when(speech.line.of_type(DELTA)[0])


@pytest.mark.parametrize("played", FORCING, indirect=True)
def test_a_forced_call_reaches_the_clients_function(played):
    forced = part(played, "forced")
    assert forced.told["called"].keys() == {"town"}
    first = forced.line.of_type(DONE)[0]["response"]
    assert first["status"] == "completed"
    assert [item["type"] for item in first["output"]] == ["function_call"]


def test_the_clients_function_is_called_and_its_result_is_spoken(played):
    tool = part(played, "tool")
    first, second = [event["response"] for event in tool.line.of_type(DONE)]
    [call] = first["output"]
    shown = [
        function
        for event in tool.line.asked
        if event["type"] == "session.update"
        for function in event["session"].get("tools") or []
    ]
    assert {function["name"] for function in shown} == {"weather"}
    jsonschema.validate(json.loads(call["arguments"]), shown[-1]["parameters"])
    assert tool.told["called"] == {"town": "Rome"}
    [output] = [
        event["item"]
        for event in tool.line.asked
        if event.get("item", {}).get("type") == "function_call_output"
    ]
    assert output["call_id"] == call["call_id"]
    assert RAIN in output["output"]
    assert words(tool.line, first["id"]) == ""
    assert words(tool.line, second["id"]) == RAIN
    check_heard(tool.told, tool.line)


def test_an_interrupted_response_is_truncated_at_its_heard_audio(played):
    line = part(played, "interruption").line
    ends = [event for event in line.of_type(DONE) if event["response"]["status"] == "cancelled"]
    # A client may interrupt the next response as well, at the latest when it closes.
    sounded = [end for end in ends if sound_ms(line, end["response"]["id"])]
    assert sounded[0] is ends[0]
    for end in sounded:
        check_cut(line, end)
    # The interruption gets a response.
    after = line.came[line.came.index(ends[0]) + 1 :]
    assert [event for event in after if event["type"] == DELTA]


def check_cut(line: Line, end: dict[str, Any]) -> None:
    """Check that a cancelled response ends at the audio that was heard."""
    cut = end["response"]
    assert cut["output"][0]["status"] == "incomplete"
    item_id = cut["output"][0]["id"]
    truncated = [event for event in line.of_type(CUT) if event["item_id"] == item_id]
    first = next(event for event in line.of_type(DELTA) if event["item_id"] == item_id)
    for event in truncated:
        passed_ms = (line.when(event) - line.when(first)) * 1000
        # The heard part is at most the sent part (in whole milliseconds), at most in real time.
        assert 0 < event["audio_end_ms"] < sound_ms(line, cut["id"]) + 1
        assert event["audio_end_ms"] <= passed_ms + 300
    # Without a truncation, all that was sent had been heard when the user spoke, or the connection
    # was closed.
    to_end_ms = (line.when(end) - line.when(first)) * 1000
    is_last = end is line.of_type(DONE)[-1]
    assert truncated or is_last or to_end_ms >= sound_ms(line, cut["id"])
    after = line.came[line.came.index(end) + 1 :]
    assert not [event for event in after if event.get("response_id") == cut["id"]]


def test_a_new_session_follows_a_broken_connection(played):
    again = part(played, "reconnect")
    broken = again.lines[0]
    assert broken.is_broken and not broken.of_type(DONE)
    assert not any(line.is_broken for line in again.lines[1:])
    ids = [line.of_type("session.created")[0]["session"]["id"] for line in again.lines]
    assert len(set(ids)) == len(ids) >= 2
    check_heard(again.told, again.line)


def test_the_stages_are_free_afterwards(server):
    server.wait_until_free()


async def test_all_events_of_the_newest_types_are_accepted():
    """Unit tests use the server's version of OpenAI's types; the clients' version is newer."""
    paths = {"PYTHONPATH": str(ROOT / "python")}  # only what needs no package of the server
    printed = await run(PYTHON, "-m", "test.protocol.ga_events", cwd=ROOT, within_s=60, **paths)
    newest = [json.loads(line) for line in printed.splitlines()]
    assert len(newest) > len(list(events()))
    assert await try_out_types(newest) > 170
    assert await try_out_unknown_keys(newest) > 600
    assert await check_fields("session.update", newest) > 80
    assert await check_fields("response.create", newest) > 80
