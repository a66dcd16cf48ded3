"""The limit on responses per key and minute."""

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.clock import SimClock
from sglang_live.core import TranscriptDelta
from sglang_live.errors import BadInputError
from sglang_live.gateway.rate_limits import (
    ClientLimits,
    OpenSessions,
    RateLimitError,
    RateLimits,
    TooManySessionsError,
)

from .fakes import FakeOrchestrator, app_of, connected, done, services, tone, types

SILENCE_1S = bytes(48_000)


@given(st.integers(1, 5), st.lists(st.floats(0, 40), max_size=60))
def test_no_minute_has_more_responses_than_the_limit(limit, pauses):
    clock = SimClock()
    limits = RateLimits(limit, clock)
    granted = []
    for pause in pauses:
        clock.advance(pause)
        try:
            status = limits.take_now("key")
        except RateLimitError as error:
            # A refusal comes only at the limit, and its wait is exact.
            recent = [at for at in granted if at > clock.now_s() - 60]
            assert len(recent) == limit
            assert error.retry_after_s == pytest.approx(recent[0] + 60 - clock.now_s())
        else:
            granted.append(clock.now_s())
            recent = [at for at in granted if at > clock.now_s() - 60]
            assert status.remaining == limit - len(recent) >= 0
            assert status.reset_s == pytest.approx(60)


def test_each_key_has_its_own_limit():
    limits = RateLimits(1, SimClock())
    limits.take_now("a")
    limits.take_now("b")
    with pytest.raises(RateLimitError):
        limits.take_now("a")
    assert RateLimits(None, SimClock()).take_now("a") is None


async def test_each_response_reports_the_remaining_responses():
    async with connected(FakeOrchestrator(), max_responses_per_minute=2) as client:
        for remaining in (1, 0):
            client.send("response.create")
            events = await client.until("response.done")
            assert types(events)[:2] == ["response.created", "rate_limits.updated"]
            [limit] = events[1]["rate_limits"]
            assert (limit["name"], limit["limit"], limit["remaining"]) == ("requests", 2, remaining)
        client.send("response.create", event_id="third")
        error = (await client.expect("error"))["error"]
        assert (error["code"], error["event_id"]) == ("rate_limit_exceeded", "third")


async def test_without_a_limit_no_status_is_reported():
    async with connected(FakeOrchestrator()) as client:
        client.send("response.create")
        assert "rate_limits.updated" not in types(await client.until("response.done"))


async def test_a_spoken_turn_beyond_the_limit_has_a_failed_response():
    clock = SimClock()
    shared = services(FakeOrchestrator(), clock, max_responses_per_minute=1)
    async with connected(shared.orchestrator, shared) as client:
        client.append(tone(500) + SILENCE_1S)
        await client.until("response.done")
        client.append(tone(500) + SILENCE_1S)
        response = (await client.find("response.done"))["response"]
        assert response["status"] == "failed"
        assert response["status_details"]["error"]["code"] == "rate_limit_exceeded"
        # The utterance is in the conversation; a minute later it gets a response.
        clock.advance(61)
        client.send("response.create")
        assert (await client.find("response.done"))["response"]["status"] == "completed"
        utterances = [i for i in shared.orchestrator.turns[-1].history if i.role == "user"]
        assert len(utterances) == 2


async def test_http_requests_count():
    app = app_of(FakeOrchestrator(), max_responses_per_minute=1, api_keys=("a", "b"))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:

        async def speak(key: str) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return await http.post("/v1/audio/speech", json={"input": "Hi."}, headers=headers)

        assert (await speak("a")).status_code == 200
        refused = await speak("a")
        assert refused.status_code == 429
        assert 59 <= int(refused.headers["retry-after"]) <= 60
        assert (await speak("b")).status_code == 200
        assert (await speak("wrong")).status_code == 401


async def test_input_transcriptions_count():
    orchestrator = FakeOrchestrator([written("one"), written("two")])
    async with connected(orchestrator, max_responses_per_minute=1) as client:
        client.update(audio={"input": {"transcription": {}, "turn_detection": None}})
        outcomes = []
        for _ in range(2):
            client.append(tone(500))
            client.send("input_audio_buffer.commit")
            events = await until_written(client)
            outcomes.append(events[-1])
        assert outcomes[0]["transcript"] == "one"
        assert outcomes[1]["error"]["code"] == "rate_limit_exceeded"


async def test_ten_seconds_of_frames_count_as_one_response():
    clock = SimClock()
    shared = services(FakeOrchestrator([written("")] * 12), clock, max_responses_per_minute=1)
    async with connected(shared.orchestrator, shared) as client:
        frames = {"type": "frames", "frame_ms": 2000}
        client.update(output_modalities=["text"], audio={"input": {"turn_detection": frames}})
        client.append(bytes(2 * 48_000 + 4_800))  # the resampler keeps a few samples
        codes = []
        for _ in range(6):
            event = await client.find("frame.done")
            codes.append(event["error"] and event["error"]["code"])
            client.append(bytes(2 * 48_000))
        assert codes == [None] * 5 + ["rate_limit_exceeded"]


def written(text: str) -> list:
    return [TranscriptDelta(text), done(text)]


async def until_written(client) -> list[dict]:
    prefix = "conversation.item.input_audio_transcription."
    events = [await client.next()]
    while events[-1]["type"] not in (prefix + "completed", prefix + "failed"):
        events.append(await client.next())
    return events


def test_each_of_several_gateways_grants_its_part():
    limits = RateLimits(10, SimClock(), n_gateways=4)
    assert [limits.take_now("a").remaining for _ in range(2)] == [1, 0]
    with pytest.raises(RateLimitError, match="10 responses per minute"):
        limits.take_now("a")
    # A limit smaller than their number leaves one to each.
    assert RateLimits(2, SimClock(), n_gateways=4).take_now("a").remaining == 0


async def test_sessions_are_a_part_too():
    sessions = OpenSessions(ClientLimits(max_sessions_per_key=5, gateways=2))
    with await sessions.open("a"), await sessions.open("a", "secret"):
        with pytest.raises(TooManySessionsError, match="key has 5"):
            await sessions.open("a")
        held = [await sessions.open(owner, "other") for owner in ("b", "c")]
        with pytest.raises(TooManySessionsError, match="client secret has 4"):
            await sessions.open("d", "other")
    for one in held:
        one.close()
    with await sessions.open("a"):
        pass


def test_limits_that_are_not_given_are_those_of_the_fleet():
    limits = ClientLimits(gateways=3).of_server(max_sessions=40, n_keys=2)
    assert (limits.max_sessions_per_key, limits.max_responses_per_minute) == (90, 2700)
    assert ClientLimits().of_server(max_sessions=40, n_keys=2).max_sessions_per_key == 30


@pytest.mark.parametrize("url", ["localhost:6379", "http://localhost"])
def test_a_store_is_named_by_its_url(url):
    with pytest.raises(BadInputError, match="valkey://"):
        ClientLimits(shared_limits=url)
