"""The Live API over WebRTC, with a real client over loopback and a real process of calls."""

import asyncio
import json

import numpy as np
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from sglang_live.webrtc.messages import SENT_RATE_HZ
from test.calls import LIVE_PATH, Browser, calling_live
from test.protocol.live import LiveEvents
from test.unit.gateway.fakes import spoken
from test.unit.gateway.realtime.test_calls import VOICE, serving, types

SAID = "session.output_transcript.delta"
OF_A_SOCKET = {"model": "default", "audio": {"format": {"type": "audio/pcmu", "rate": 8000}}}
OF_A_WAKER = {"model": "default", "wake_policy": {"type": "speech"}}
NO_AUDIO = ("session.output_audio.delta", "session.input_audio.append")


def check(browser: Browser) -> None:
    """All events have the protocol's form, and none of them audio."""
    seen = LiveEvents()
    for event in browser.events:
        seen.see(event)
    assert not set(types(browser.events)) & set(NO_AUDIO)


async def test_a_user_is_heard_and_answered():
    async with (
        serving(spoken("It rains.", 800)) as (http, orchestrator),
        calling_live(http, instructions="Be brief.") as browser,
    ):
        session = browser.events[0]["session"]
        assert (session["id"], session["instructions"]) == (browser.id, "Be brief.")
        assert "format" not in session["audio"]
        browser.microphone.say(VOICE)
        said = ""
        while said != "It rains.":
            said += (await browser.find(SAID, 30))["delta"]
        await asyncio.sleep(1.0)
        sound = browser.sound()
        # 60 ms of silence are before it, 100 after it.
        assert len(sound) / SENT_RATE_HZ == pytest.approx(0.96, abs=0.11)
        spectrum = np.abs(np.fft.rfft(sound[4800:14_400]))
        assert spectrum.argmax() * SENT_RATE_HZ / 9600 == pytest.approx(300, abs=20)
        turn = orchestrator.turns[0]
        assert turn.history[0].parts[0].duration_s > 0.7
        check(browser)


async def test_what_comes_evenly_leaves_without_gaps():
    script = spoken("A long story.", 4000)
    async with serving(script) as (http, _), calling_live(http) as browser:
        browser.send("session.commentary.append", content="Tell it.", delegation_id=None)
        await browser.find(SAID, 30)
        await asyncio.sleep(4.6)
        sound = browser.sound()
        loud = np.abs(sound.reshape(-1, 480)).max(axis=1) > 1000
        first, last = np.flatnonzero(loud)[[0, -1]]
        assert (last - first) * 0.02 == pytest.approx(4.0, abs=0.2)
        assert loud[first:last].mean() > 0.97


async def test_events_of_a_socket_are_refused_and_a_close_ends_the_call():
    async with serving() as (http, orchestrator), calling_live(http) as browser:
        browser.send("session.start", session={"model": "default"})
        assert (await browser.find("error"))["error"]["code"] == "session_already_started"
        browser.send("session.input_audio.append", audio="AAAA")
        assert (await browser.find("error"))["error"]["code"] == "unsupported_event"
        browser.send("session.close")
        closed = await browser.find("session.closed")
        assert (closed["reason"], closed["session"]["id"]) == ("close_requested", browser.id)
        await asyncio.wait_for(browser.closed.wait(), 10)
        assert orchestrator.session.n_closed == 1
        check(browser)


async def test_hanging_up_closes_the_session():
    async with serving() as (http, orchestrator), calling_live(http) as browser:
        path = f"{LIVE_PATH}/{browser.id}/hangup"
        assert (await http.post(path)).status_code == 200
        assert (await browser.find("session.closed"))["reason"] == "close_requested"
        await asyncio.wait_for(orchestrator.session.closed.wait(), 10)
        again = await http.post(path)
        assert (again.status_code, again.json()["error"]["code"]) == (404, "session_not_found")


async def test_a_call_that_never_connects_can_be_hung_up():
    async with serving() as (http, orchestrator):
        offer = await Browser().offer()
        body = {"session": {"model": "default"}, "transport": {"type": "webrtc", "sdp": offer}}
        begun = (await http.post(LIVE_PATH, json=body)).json()
        path = f"{LIVE_PATH}/{begun['session']['id']}/hangup"
        assert (await http.post(path)).status_code == 200
        assert orchestrator.session.n_closed == 1
        assert (await http.post(path)).status_code == 404


async def test_a_sideband_gets_the_audio_of_both_sides():
    async with serving(spoken("It rains.", 800)) as (http, _), calling_live(http) as browser:
        url = f"ws://{http.base_url.netloc.decode()}{LIVE_PATH}/{browser.id}/attach"
        async with connect(url) as aside:
            seen, came = LiveEvents(is_sideband=True), []

            async def until(kind: str) -> None:
                async with asyncio.timeout(20):
                    while not came or came[-1]["type"] != kind:
                        came.append(json.loads(await aside.recv()))
                        seen.see(came[-1])

            await until("session.started")
            browser.microphone.say(VOICE)
            await until(SAID)
            assert {*NO_AUDIO} <= {*types(came)}
            await aside.send('{"type": "session.close"}')
            with pytest.raises(ConnectionClosed):
                await until("never")
            assert came[-1]["type"] == "session.closed"
        await browser.find("session.closed")


async def test_a_client_that_leaves_ends_its_session():
    async with serving() as (http, orchestrator), calling_live(http) as browser:
        await browser.connection.close()
        await asyncio.wait_for(orchestrator.session.closed.wait(), 15)


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"session": {}}, "session.model", "missing_required_parameter"),
        ({"session": {"model": "x"}}, "session.model", "model_not_found"),
        ({"session": OF_A_SOCKET}, "session.audio.format", "unsupported_parameter"),
        ({"session": OF_A_WAKER}, "session.wake_policy", "unsupported_parameter"),
        ({"transport": {"type": "webrtc"}}, "transport.sdp", "missing_required_parameter"),
        ({"transport": {"type": "sip", "sdp": "v=0"}}, "transport.type", "invalid_value"),
        ({"transport": {"type": "webrtc", "sdp": "v=0"}}, "transport.sdp", "invalid_sdp"),
        ({"more": 1}, "more", "unknown_parameter"),
    ],
)
async def test_refusals_come_before_the_session(change, param, code):
    async with serving() as (http, orchestrator):
        transport = {"type": "webrtc", "sdp": await Browser().offer()}
        body = {"session": {"model": "default"}, "transport": transport, **change}
        response = await http.post(LIVE_PATH, json=body)
        error = response.json()["error"]
        assert response.status_code in (400, 404)
        assert (error["param"], error["code"]) == (param, code), error
        assert orchestrator.sessions == []


async def test_a_call_needs_a_key():
    async with serving(api_keys=("k",)) as (http, _):
        browser = Browser()
        refused = await browser.connect_live(http, {"model": "default"})
        assert refused.status_code == 401
        async with calling_live(http, headers={"authorization": "Bearer k"}) as browser:
            path = f"{LIVE_PATH}/{browser.id}/hangup"
            assert (await http.post(path)).status_code == 401
