"""The Live API on the trained demo model, whose rules delegate what it does not understand.

Clients are unmodified, the server is whole; nothing is scripted but the application.
"""

from collections.abc import Awaitable
from typing import Any

import pytest

from test.e2e.conftest import running_server
from test.e2e.test_live import framework_at, play, text_of
from test.e2e.together import Together
from test.unit.gateway.live.text_backend import TextBackend, called, said

pytestmark = [pytest.mark.e2e]


@pytest.fixture(scope="module")
def plays(talking, tmp_path_factory) -> Together[str, dict[str, Any]]:
    """Parts of OpenAI's client, and LiveKit's with a function."""

    def run(part: str) -> Awaitable[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("live")
        if part == "responses":
            return framework_at(talking.http, "livekit_live.py", folder, part)
        return play(part, talking.http, folder)

    return Together(("responses", "delegated", "decided", "aside"), run)


def test_the_application_does_what_the_model_does_not_understand(plays):
    told = plays["delegated"]
    assert text_of(told, "output") == "It rains in Rome."
    speakers = [turn["speaker"] for turn in told["turns"]]
    assert speakers[-1] == "assistant"


def test_questions_are_decided_with_probabilities(plays):
    told = plays["decided"]
    asked, delegated = [e for e in told["events"] if e["type"] == "decision.event"]
    assert asked["client_event_id"] == "mine"
    [created] = [e for e in told["events"] if e["type"] == "session.delegation.created"]
    assert delegated["delegation_id"] == created["delegation"]["id"]
    for event in (asked, delegated):
        predicate, choice, score = event["event"]["decision"]["answers"]
        assert 0 < predicate["probability"] < 1
        for answer in (choice, score):
            shares = [one["probability"] for one in answer["probabilities"]]
            assert sum(shares) == pytest.approx(1) and max(shares) == answer["confidence"]
        assert score["score"] == pytest.approx(score["probabilities"][1]["probability"])


def test_a_sideband_has_the_model_speak(plays):
    told = plays["aside"]
    [seen] = [event["events"] for event in told["events"] if event["type"] == "seen"]
    kinds = [event["type"] for event in seen]
    assert kinds[0] == "session.started" and kinds[-1] == "session.closed"
    text = "".join(e["delta"] for e in seen if e["type"] == "session.output_transcript.delta")
    assert text == text_of(told, "output") == "Greet me."
    heard = [event for event in seen if event["type"] == "session.input_audio.append"]
    audio = [event for event in seen if event["type"] == "session.output_audio.delta"]
    assert len(heard) > 20 and len(audio) > 10
    assert all(event["end_ms"] - event["start_ms"] == 100 for event in audio)


# The model delegates in the tests above; LiveKit is answered what a script delegates in test_live.
@pytest.mark.nightly
async def test_livekit_answers_what_is_delegated(talking, tmp_path):
    told = await framework_at(talking.http, "livekit_live.py", tmp_path, "client")
    assert told["errors"] == []
    assert told["greeting"]
    assert told["answer"].split()[-2:] == ["It", "rains."]  # a late greeting may be before it
    assert told["sound_s"] > 1


def test_livekits_function_is_called(plays):
    told = plays["responses"]
    assert told["errors"] == []
    assert told["called"] == ["unknown"]
    assert told["answer"].split()[-2:] == ["It", "rains."]  # a late greeting may be before it


# LiveKit's function without it is above; gateways with it are in test/unit/gateway/live.
@pytest.mark.nightly
async def test_the_operators_text_model_calls_livekits_function(tmp_path):
    backend = TextBackend(called(("weather", '{"town": "Rome"}')), said("It rains."))
    log_dir = tmp_path / "logs"
    log_dir.mkdir()
    async with backend.serving() as url:
        key = {"SGLANG_LIVE_BACKEND_KEY": "sk-own"}
        flags = ("--live-backend", url)
        with running_server("demo", log_dir, *flags, environment=key) as server:
            told = await framework_at(server.http, "livekit_live.py", tmp_path, "responses")
    assert told["errors"] == []
    assert told["called"] == ["Rome"]
    assert told["answer"].split()[-2:] == ["It", "rains."]  # a late greeting may be before it
    assert backend.headers["authorization"] == "Bearer sk-own"
    assert backend.asked[1]["input"][-1]["output"] == "It rains."
