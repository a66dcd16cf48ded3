"""Which sockets may take a session over, which losses keep one, and for how long."""

import asyncio
import base64
import json
from contextlib import asynccontextmanager
from urllib.parse import urlencode

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from sglang_live.core import AudioDelta, TranscriptDelta
from sglang_live.gateway.draining import Drain
from test.unit.gateway.fakes import FakeOrchestrator, app_of, done, spoken, tone
from test.unit.gateway.live_server import listening
from test.unit.gateway.test_draining import ask, until

from .lossy_world import Gates, LossyClient, LossyWorld

pytestmark = pytest.mark.usefixtures("must_not_hang")

DELTA = "response.output_audio.delta"


@asynccontextmanager
async def serving(orchestrator: FakeOrchestrator | None = None, **config):
    """Yields a function that opens a socket: its query, and its key."""
    app = app_of(orchestrator or FakeOrchestrator(), **config)
    async with listening(app) as address:

        def socket(key: str | None = None, **query):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            url = f"ws://{address}/v1/realtime?{urlencode(query)}"
            return connect(url, additional_headers=headers, compression=None)

        yield socket


async def resumable(socket, **session) -> dict:
    """Returns the session's `resumable`."""
    await until(socket, "session.created")
    update = {"type": "realtime", "resumable": True, **session}
    await socket.send(json.dumps({"type": "session.update", "session": update}))
    return (await until(socket, "session.updated"))["session"]["resumable"]


async def refusal(socket) -> tuple[str, str | None, int]:
    """Code and parameter of the error, and close code."""
    error = json.loads(await socket.recv())
    assert error["type"] == "error"
    with pytest.raises(ConnectionClosed) as closed:
        await socket.recv()
    return error["error"]["code"], error["error"]["param"], closed.value.rcvd.code


async def test_a_resumed_session_has_its_settings_and_another_token():
    orchestrator = FakeOrchestrator()
    async with serving(orchestrator) as open_socket:
        async with open_socket() as first:
            before = await resumable(first, instructions="Be brief.")
            assert before["grace_ms"] == 30_000
            first.transport.abort()
            async with open_socket(resume=before["token"]) as second:
                event = await until(second, "session.resumed")
                session = event["session"]
                assert (session["instructions"], event["events_received"]) == ("Be brief.", 1)
                assert session["resumable"]["token"] not in ("", before["token"])
                await ask(second)
                await until(second, "response.done")
        assert len(orchestrator.sessions) == 1
        await orchestrator.session.closed.wait()


async def test_a_stolen_used_expired_or_malformed_token_is_refused_and_changes_nothing():
    orchestrator = FakeOrchestrator()
    async with serving(orchestrator, api_keys=("mine", "theirs")) as open_socket:
        async with open_socket("mine") as first:
            token = (await resumable(first))["token"]
            wrong = {"another owner": ("theirs", token)}
            wrong |= {
                repr(bad): ("mine", bad) for bad in ("", "x", token[:-1], token + "x", "é\\0")
            }
            for key, bad in wrong.values():
                async with open_socket(key, resume=bad) as thief:
                    assert await refusal(thief) == ("invalid_resume_token", None, 1008)
            await ask(first)  # its socket is as before
            await until(first, "response.done")
            async with open_socket("mine", resume=token) as second:
                resumed = await until(second, "session.resumed")
                for key in ("mine", "theirs"):
                    async with open_socket(key, resume=token) as thief:
                        assert await refusal(thief) == ("invalid_resume_token", None, 1008)
                await ask(second)
                await until(second, "response.done")
        await orchestrator.session.closed.wait()
        async with open_socket("mine", resume=resumed["session"]["resumable"]["token"]) as late:
            assert (await refusal(late))[0] == "invalid_resume_token"
    assert len(orchestrator.sessions) == 1


@pytest.mark.parametrize(
    ("query", "code", "param"),
    [
        ({"heard_ms": "-1"}, "invalid_value", "heard_ms"),
        ({"heard_ms": "1.5"}, "invalid_value", "heard_ms"),
        ({"heard_ms": "999999999"}, "invalid_value", "heard_ms"),
        ({"after": "event_unknown_1"}, "resume_too_late", "after"),
        ({"after": "x" * 5000}, "resume_too_late", "after"),
        ({"intent": "transcription"}, "invalid_value", "intent"),
        ({"resumable": "true"}, "unknown_parameter", "resumable"),
        ({"model": "another"}, "model_not_found", "model"),
    ],
)
async def test_a_faulty_resumption_is_refused_and_the_token_stays(query, code, param):
    async with serving() as open_socket, open_socket() as first:
        token = (await resumable(first))["token"]
        async with open_socket(resume=token, **query) as faulty:
            assert await refusal(faulty) == (code, param, 1008)
        async with open_socket(resume=token) as second:
            await until(second, "session.resumed")


async def test_a_new_session_has_no_position():
    async with serving() as open_socket:
        for name in ("after", "heard_ms"):
            async with open_socket(**{name: "1"}) as faulty:
                assert await refusal(faulty) == ("invalid_value", name, 1008)


async def test_a_token_opens_nothing_without_a_key():
    async with serving(api_keys=("mine",)) as open_socket, open_socket("mine") as first:
        token = (await resumable(first))["token"]
        with pytest.raises(Exception, match="401"):
            async with open_socket(resume=token):
                pass


@pytest.mark.parametrize("code", [1000, 1001, None])
async def test_a_close_frame_of_the_client_ends_a_resumable_session_at_once(code):
    orchestrator = FakeOrchestrator()
    async with serving(orchestrator) as open_socket, open_socket() as first:
        token = (await resumable(first))["token"]
        if code is None:  # as browsers close
            first.protocol.send_close()
            first.transport.write(b"".join(first.protocol.data_to_send()))
        else:
            await first.close(code)
        await orchestrator.session.closed.wait()
        async with open_socket(resume=token) as late:
            assert (await refusal(late))[0] == "invalid_resume_token"


async def test_the_loss_of_a_session_that_is_not_resumable_ends_it():
    orchestrator = FakeOrchestrator()
    async with serving(orchestrator) as open_socket, open_socket() as first:
        token = (await resumable(first))["token"]
        update = {"type": "realtime", "resumable": False}
        await first.send(json.dumps({"type": "session.update", "session": update}))
        assert "resumable" not in (await until(first, "session.updated"))["session"]
        async with open_socket(resume=token) as late:
            assert (await refusal(late))[0] == "invalid_resume_token"
        first.transport.abort()
        await orchestrator.session.closed.wait()


async def test_a_server_that_keeps_no_session_says_so():
    async with serving(resume_s=0.0) as open_socket, open_socket() as first:
        assert await resumable(first) is None


async def test_a_new_socket_takes_over_from_one_that_the_server_takes_for_alive():
    async with serving() as open_socket, open_socket() as first:
        token = (await resumable(first))["token"]
        async with open_socket(resume=token) as second:
            await until(second, "session.resumed")
            with pytest.raises(ConnectionClosed) as closed:
                await first.recv()
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1000, "resumed")
            await ask(second)
            await until(second, "response.done")


async def test_a_lost_session_counts_for_its_key_and_its_resumption_needs_no_room():
    orchestrator = FakeOrchestrator()
    limits = {"api_keys": ("mine",), "max_sessions_per_key": 1}
    async with serving(orchestrator, **limits) as open_socket, open_socket("mine") as first:
        token = (await resumable(first))["token"]
        first.transport.abort()
        await first.wait_closed()
        async with open_socket("mine") as other:
            assert (await refusal(other))[0] == "rate_limit_exceeded"
        async with open_socket("mine", resume=token) as second:
            await until(second, "session.resumed")
        await orchestrator.session.closed.wait()
        async with open_socket("mine") as other:
            await until(other, "session.created")


async def test_a_drain_ends_a_lost_session_although_its_response_is_not_heard():
    orchestrator, drain = FakeOrchestrator([spoken("A long story.", 8000)]), Drain()
    async with serving(orchestrator, drain=drain) as open_socket, open_socket() as first:
        await resumable(first)
        await ask(first)
        await until(first, "response.done")
        first.transport.abort()
        await asyncio.sleep(0.05)
        assert not orchestrator.session.closed.is_set()
        drain.began.set()
        await orchestrator.session.closed.wait()
        await drain.until_quiet()


async def test_transcription_sessions_are_resumable_too():
    async with serving() as open_socket, open_socket(intent="transcription") as first:
        await until(first, "session.created")
        update = {"type": "transcription", "resumable": True}
        await first.send(json.dumps({"type": "session.update", "session": update}))
        session = (await until(first, "session.updated"))["session"]
        first.transport.abort()
        async with open_socket(resume=session["resumable"]["token"]) as second:
            resumed = (await until(second, "session.resumed"))["session"]
            assert resumed["type"] == "transcription"


async def test_the_settings_of_a_client_secret_make_a_session_resumable():
    async with serving(api_keys=("mine",)) as open_socket:
        address = open_socket("mine").uri.split("/")[2]
        form = {"session": {"type": "realtime", "resumable": True}}
        async with httpx.AsyncClient(headers={"Authorization": "Bearer mine"}) as http:
            answer = await http.post(f"http://{address}/v1/realtime/client_secrets", json=form)
        async with open_socket(answer.json()["value"]) as first:
            created = await until(first, "session.created")
            first.transport.abort()
            token = created["session"]["resumable"]["token"]
            async with open_socket("mine", resume=token) as second:
                await until(second, "session.resumed")


# --- what is sent again ---


async def answered(first, **session) -> tuple[str, str, bytes]:
    """Ask, and read the response. Returns the token, the id of the last event, and the audio."""
    token = (await resumable(first, **session))["token"]
    await ask(first)
    audio = b""
    while (event := json.loads(await first.recv()))["type"] != "response.done":
        audio += base64.b64decode(event["delta"]) if event["type"] == DELTA else b""
    return token, event["event_id"], audio


async def again(second) -> list[dict]:
    """The events before session.resumed."""
    events = [json.loads(await second.recv())]
    while events[-1]["type"] != "session.resumed":
        events.append(json.loads(await second.recv()))
    return events[:-1]


@pytest.mark.parametrize(("form", "n_bytes"), [("audio/pcm", 48), ("audio/pcmu", 8)])
async def test_audio_comes_again_from_the_heard_millisecond_on(form, n_bytes):
    orchestrator = FakeOrchestrator([spoken("Hello there.", 800)])
    async with serving(orchestrator) as open_socket, open_socket() as first:
        audio_form = {"output": {"format": {"type": form}}}
        token, last_id, audio = await answered(first, audio=audio_form)
        async with open_socket(resume=token, after=last_id, heard_ms=215) as second:
            events = await again(second)
    assert {event["type"] for event in events} == {DELTA}
    assert (
        b"".join(base64.b64decode(e["delta"]) for e in events)[:: n_bytes // 8]
        == (audio[215 * n_bytes :][:: n_bytes // 8])
    )


async def test_a_client_that_names_no_event_has_got_all_up_to_the_audio_that_it_heard():
    words = [TranscriptDelta("One "), AudioDelta(tone(200)), TranscriptDelta("two.")]
    orchestrator = FakeOrchestrator([[*words, AudioDelta(tone(200)), done("One two.")]])
    async with serving(orchestrator) as open_socket, open_socket() as first:
        token, last_id, audio = await answered(first)
        async with open_socket(resume=token, heard_ms=200) as second:
            events = await again(second)
    said = [e["delta"] for e in events if e["type"] == "response.output_audio_transcript.delta"]
    heard = [base64.b64decode(e["delta"]) for e in events if e["type"] == DELTA]
    assert (said, b"".join(heard)) == (["two."], audio[200 * 48 :])
    assert events[-1]["event_id"] == last_id


async def test_what_the_log_does_not_hold_cannot_be_sent_again_and_the_session_stays():
    orchestrator = FakeOrchestrator([spoken("A long story.", 2000)])
    limit = {"resume_log_bytes": 90_000}  # 1.3 s of audio
    async with serving(orchestrator, **limit) as open_socket, open_socket() as first:
        token, last_id, audio = await answered(first)
        first.transport.abort()
        async with open_socket(resume=token, after=last_id, heard_ms=200) as early:
            assert await refusal(early) == ("resume_too_late", "heard_ms", 1008)
        async with open_socket(resume=token, after=first_id(last_id), heard_ms=200) as early:
            assert await refusal(early) == ("resume_too_late", "after", 1008)
        await asyncio.sleep(1)  # no audio is heard faster than in real time
        async with open_socket(resume=token, after=last_id, heard_ms=1000) as second:
            events = await again(second)
    assert b"".join(base64.b64decode(e["delta"]) for e in events) == audio[1000 * 48 :]


def first_id(event_id: str) -> str:
    return event_id.rpartition("_")[0] + "_0"


# --- how long ---


async def test_a_session_whose_client_does_not_come_back_ends_after_the_grace_period():
    world = LossyWorld([], Gates(), resume_s=10.0)
    client = LossyClient(world)
    async with client:
        await client.until("session.created")
        await client.send("session.update", session={"type": "realtime", "resumable": True})
        await client.until("session.updated")
        client.wire.cut()
        await client.tick(100)
        assert world.value("sessions_open") == 1
        await client.tick(40)
        assert world.orchestrator.session.closed.is_set()
    assert world.value("sessions_open") == 0
    assert world.value("sockets_lost_total", outcome="expired") == 1
