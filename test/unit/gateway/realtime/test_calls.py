"""Sessions over WebRTC, with a real client over loopback and a real process of calls."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import numpy as np
import psutil
import pytest
from aioice import stun
from websockets.asyncio.client import connect

from sglang_live.core import AudioDelta
from sglang_live.webrtc.messages import SENT_RATE_HZ
from test.calls import PATH, Browser, calling
from test.protocol import ga_events
from test.unit.gateway.fakes import FakeOrchestrator, app_of, paced, spoken, tone
from test.unit.gateway.live_server import listening

VOICE = np.frombuffer(tone(800), np.int16)
# Not what is played: that would be its echo.
OTHER_VOICE = np.random.default_rng(1).normal(0, 6000, len(VOICE)).astype(np.int16)
STARTED, STOPPED, CLEARED = (
    f"output_audio_buffer.{what}" for what in ("started", "stopped", "cleared")
)


@asynccontextmanager
async def serving(
    *scripts: list, **config
) -> AsyncIterator[tuple[httpx.AsyncClient, FakeOrchestrator]]:
    orchestrator = FakeOrchestrator(list(scripts), n_more=5)
    async with (
        listening(app_of(orchestrator, **config)) as address,
        httpx.AsyncClient(base_url=f"http://{address}", timeout=30) as http,
    ):
        yield http, orchestrator


def types(events: list[dict]) -> list[str]:
    return [event["type"] for event in events]


async def test_a_user_is_heard_and_answered():
    async with serving(spoken("It rains.", 800)) as (http, orchestrator), calling(http) as browser:
        browser.microphone.say(VOICE)
        events = await browser.until(STOPPED)
        order = [
            "input_audio_buffer.speech_started",
            "input_audio_buffer.speech_stopped",
            "input_audio_buffer.committed",
            "response.created",
            "response.content_part.added",
            STARTED,
            "response.done",
            STOPPED,
        ]
        found = [t for t in types(events) if t in order]
        assert [t for t in found if t not in (STARTED, "response.done")] == [
            t for t in order if t not in (STARTED, "response.done")
        ]
        assert not [t for t in types(events) if t.startswith("response.output_audio.delta")]
        stopped = next(e for e in events if e["type"] == "input_audio_buffer.speech_stopped")
        started = next(e for e in events if e["type"] == "input_audio_buffer.speech_started")
        assert 1000 < stopped["audio_end_ms"] - started["audio_start_ms"] < 2500
        [turn] = orchestrator.turns
        assert turn.history[0].parts[0].duration_s > 0.7
        ids = {e["response_id"] for e in events if e["type"] in (STARTED, STOPPED)}
        assert ids == {next(e for e in events if e["type"] == "response.created")["response"]["id"]}
        await asyncio.sleep(0.3)
        sound = browser.sound()
        assert len(sound) / SENT_RATE_HZ == pytest.approx(0.9, abs=0.1)  # 0.1 s is silence
        spectrum = np.abs(np.fft.rfft(sound[2400:16_800]))
        assert spectrum.argmax() * SENT_RATE_HZ / 14_400 == pytest.approx(300, abs=20)


async def test_an_interruption_clears_what_waits_and_truncates_at_what_left():
    frames = [AudioDelta(tone(80)) for _ in range(100)]
    script = [*paced("one two three four", 0)[:4], *frames, asyncio.Event()]
    async with serving(script, spoken("Yes?")) as (http, _), calling(http) as browser:
        browser.send("response.create")
        await browser.until(STARTED)
        await asyncio.sleep(1.0)
        browser.microphone.say(OTHER_VOICE)
        events = await browser.until("conversation.item.truncated")
        cleared = types(events)
        assert CLEARED in cleared or CLEARED in types(await browser.until(CLEARED))
        heard_ms = 20 * len(browser.heard)
        truncated = events[-1]
        assert truncated["audio_end_ms"] == pytest.approx(heard_ms, abs=200)
        assert 1000 < truncated["audio_end_ms"] < 4000


async def test_the_client_clears_the_buffer():
    script = [
        *paced("one two", 0)[:2],
        *(AudioDelta(tone(80)) for _ in range(100)),
        asyncio.Event(),
    ]
    async with serving(script) as (http, _), calling(http) as browser:
        browser.send("response.create")
        await browser.until(STARTED)
        browser.send("output_audio_buffer.clear")
        assert (await browser.find("response.done"))["response"]["status"] == "cancelled"
        n = len(browser.heard)
        await asyncio.sleep(0.5)
        assert len(browser.heard) - n <= 8
        assert CLEARED in types(browser.events)


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer k"}])
async def test_a_call_needs_a_key(headers):
    async with serving(api_keys=("k",)) as (http, orchestrator):
        response = await Browser().connect(http, headers=headers)
        assert response.status_code == (201 if headers else 401)
        # Without one, a call costs neither a session nor a process.
        assert [len(orchestrator.sessions), len(hosts())] == ([1, 1] if headers else [0, 0])


async def test_settings_come_with_the_offer_and_with_client_secrets():
    async with serving(api_keys=("k",)) as (http, _):
        key = {"authorization": "Bearer k"}
        settings = {"type": "realtime", "instructions": "Be kind."}
        made = await http.post(
            "/v1/realtime/client_secrets", json={"session": settings}, headers=key
        )
        secret = {"authorization": f"Bearer {made.json()['value']}"}
        async with calling(http, headers=secret) as browser:
            assert browser.events[0]["session"]["instructions"] == "Be kind."
        session = {
            "type": "realtime",
            "instructions": "Be brief.",
            "audio": {"output": {"speed": 1.25}},
        }
        files = {"session": (None, json.dumps(session), "application/json")}
        async with calling(http, files=files, headers=key) as browser:
            shown = browser.events[0]["session"]
            assert (shown["instructions"], shown["audio"]["output"]["speed"]) == ("Be brief.", 1.25)
            assert shown["audio"]["input"]["format"] == {"type": "audio/pcm", "rate": 24000}
            browser.send("session.update", session=shown)
            assert (await browser.find("session.updated"))["session"] == shown


async def test_a_transcription_session():
    async with serving(spoken("Hello.", 0)) as (http, _):
        files = {"session": (None, '{"type": "transcription"}', "application/json")}
        async with calling(http, files=files) as browser:
            assert browser.events[0]["session"]["type"] == "transcription"
            browser.microphone.say(VOICE)
            kind = "conversation.item.input_audio_transcription.completed"
            assert (await browser.find(kind))["transcript"] == "Hello."


async def test_hanging_up_ends_the_session_and_the_second_time_there_is_no_call():
    async with serving() as (http, orchestrator), calling(http) as browser:
        path = f"{PATH}/{browser.id}/hangup"
        assert (await http.post(path)).status_code == 200
        assert orchestrator.session.n_closed == 1
        await asyncio.wait_for(browser.closed.wait(), 10)
        again = await http.post(path)
        assert (again.status_code, again.json()["error"]["code"]) == (404, "call_not_found")
        for verb in ("accept", "reject", "refer"):
            assert (await http.post(f"{PATH}/{browser.id}/{verb}")).status_code == 404


async def test_a_client_that_leaves_ends_its_session():
    async with serving() as (http, orchestrator), calling(http) as browser:
        await browser.connection.close()
        await asyncio.wait_for(orchestrator.session.closed.wait(), 15)


async def test_a_process_that_dies_ends_its_calls_and_the_next_call_has_another():
    async with serving() as (http, orchestrator):
        async with calling(http):
            [process] = hosts()
            process.kill()
            await asyncio.wait_for(orchestrator.session.closed.wait(), 30)
        async with calling(http):
            assert [one.pid for one in hosts()] != [process.pid]
        assert len(orchestrator.sessions) == 2
    assert hosts() == []


def hosts() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if "sglang_live.webrtc.host" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE
    ]


async def test_an_item_that_is_too_large_for_the_channel_comes_without_its_audio():
    async with serving(spoken("Yes.")) as (http, _), calling(http) as browser:
        browser.send(
            "session.update",
            session={"type": "realtime", "audio": {"input": {"turn_detection": None}}},
        )
        await browser.until("session.updated")
        await asyncio.sleep(2.5)
        browser.send("input_audio_buffer.commit")
        item_id = (await browser.find("input_audio_buffer.committed"))["item_id"]
        browser.send("conversation.item.retrieve", item_id=item_id)
        item = (await browser.find("conversation.item.retrieved"))["item"]
        assert item["content"][0]["type"] == "input_audio"
        assert "audio" not in item["content"][0]


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"content": "v=0\r\n", "headers": {"content-type": "application/sdp"}}, "sdp"),
        ({"content": "", "headers": {"content-type": "application/sdp"}}, "sdp"),
        ({"content": "x" * 70_000, "headers": {"content-type": "application/sdp"}}, "sdp"),
        ({"json": {"sdp": "v=0"}}, "Content-Type"),
        ({"files": {"session": (None, "{}", "application/json")}}, "sdp"),
    ],
)
async def test_what_is_no_offer_is_refused(request_, param):
    async with serving() as (http, orchestrator):
        response = await http.post(PATH, **request_)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error
        assert orchestrator.sessions == []


async def test_mutated_offers_are_answered_or_refused_and_the_process_lives():
    rng = random.Random(5)
    async with serving() as (http, _):
        offer = await Browser().offer()
        lines = offer.split("\r\n")
        statuses = set()
        for _ in range(40):
            changed = list(lines)
            for _ in range(rng.choice((1, 3))):
                at = rng.randrange(len(changed))
                match rng.randrange(3):
                    case 0:
                        del changed[at]
                    case 1:
                        changed[at] = changed[at][: rng.randrange(1 + len(changed[at]))]
                    case _:
                        changed.insert(at, rng.choice(lines))
            response = await http.post(
                PATH, content="\r\n".join(changed), headers={"content-type": "application/sdp"}
            )
            statuses.add(response.status_code)
        assert statuses <= {201, 400}
        assert len(hosts()) == 1


async def test_a_channel_takes_any_frame_and_the_call_goes_on():
    rng, n_frames = random.Random(7), 300
    every = [event for event in ga_events.events() if event["type"] != "response.create"]
    valid = [json.dumps(event) for event in every]
    async with serving() as (http, orchestrator), calling(http) as browser:
        for _ in range(n_frames):
            frame = list(rng.choice(valid))
            for _ in range(rng.choice((1, 3, 30))):
                frame[rng.randrange(len(frame))] = rng.choice('{}[]":,x0\u2028\x00')
            text = "".join(frame[: rng.choice((len(frame), rng.randrange(1, len(frame))))])
            browser.channel.send(text if rng.random() < 0.9 else rng.randbytes(len(text)))
            await asyncio.sleep(0)
        browser.send("conversation.item.retrieve", item_id="the last one")
        while (await browser.find("error"))["error"]["param"] != "item_id":
            pass
        browser.send("session.update", session={"type": "realtime"})
        await browser.find("session.updated")
        assert types(browser.events).count("error") > n_frames / 2
        assert len(hosts()) == 1 and orchestrator.session.n_closed == 0


async def test_an_address_that_answers_no_check_gets_no_sound():
    """Nothing but the checks themselves, also while there is a response to send."""
    got: list[bytes] = []

    class Silent(asyncio.DatagramProtocol):
        def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
            got.append(data)

    loop = asyncio.get_running_loop()
    silent, _ = await loop.create_datagram_endpoint(Silent, local_addr=("127.0.0.1", 0))
    port = silent.get_extra_info("sockname")[1]
    candidate = f"a=candidate:1 1 udp 2130706431 127.0.0.1 {port} typ host"
    async with serving(spoken("It rains.", 2000)) as (http, _):
        browser = Browser()
        lines = (await browser.offer()).splitlines()
        at = next(n for n, line in enumerate(lines) if line.startswith("m=application"))
        offer = "\r\n".join((*lines[:at], candidate, *lines[at:], ""))
        begun = await http.post(PATH, content=offer, headers={"content-type": "application/sdp"})
        url = f"ws://{http.base_url.host}:{http.base_url.port}/v1/realtime?call_id="
        async with connect(url + begun.headers["location"].rpartition("/")[2]) as side:
            await side.send('{"type": "response.create"}')
            await asyncio.sleep(3.0)
        await browser.connection.close()
    silent.close()
    assert got and all(stun.parse_message(data).message_class == stun.Class.REQUEST for data in got)


async def test_a_sideband_sees_the_calls_events_and_sends_some():
    async with serving(spoken("Yes."), api_keys=("k", "other")) as (http, orchestrator):
        key = {"authorization": "Bearer k"}
        async with calling(http, headers=key) as browser:
            url = f"ws://{http.base_url.host}:{http.base_url.port}/v1/realtime?call_id={browser.id}"
            async with connect(url, additional_headers=key) as side:
                await side.send('{"type": "response.create"}')
                while json.loads(await side.recv())["type"] != "response.done":
                    pass
                await browser.until("response.done")
            async with connect(url, additional_headers={"authorization": "Bearer other"}) as side:
                assert json.loads(await side.recv())["error"]["code"] == "call_not_found"
            browser.send("session.update", session={"type": "realtime"})
            await browser.until("session.updated")
            assert orchestrator.session.n_closed == 0


async def test_browsers_pages_are_allowed_by_their_origin():
    page = {"origin": "https://app.example"}
    asked = {
        **page,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-openai-agents-sdk",
    }
    config = {"cors_origin": ("https://app.example",), "api_keys": ("k",)}
    async with serving(**config) as (http, _):
        allowed = await http.options(PATH, headers=asked)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        begun = await Browser().connect(http, headers={**page, "authorization": "Bearer k"})
        assert begun.headers["access-control-expose-headers"] == "Location"
        other = await http.options(PATH, headers={**asked, "origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


async def test_without_aiortc_the_extra_is_named(monkeypatch):
    async with serving() as (http, _):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        response = await http.post(PATH, content="v=0", headers={"content-type": "application/sdp"})
        assert response.status_code == 501
        assert "sglang-live[webrtc]" in response.json()["error"]["message"]


async def test_one_tenth_of_the_packets_lost_changes_no_turn():
    async with serving(spoken("Yes.")) as (http, orchestrator), calling(http, loss=0.1) as browser:
        await asyncio.sleep(1.0)  # so that the padding before the speech is there
        browser.microphone.say(np.tile(VOICE, 3))
        events = await browser.until("response.done")
        begins = [e["audio_start_ms"] for e in events if e["type"].endswith("speech_started")]
        ends = [e["audio_end_ms"] for e in events if e["type"].endswith("speech_stopped")]
        assert len(begins) == len(ends) == 1
        assert ends[0] - begins[0] == pytest.approx(2400 + 300 + 500, abs=350)
        assert len(orchestrator.turns) == 1


async def test_a_call_that_does_not_connect_ends():
    async with serving() as (http, orchestrator):
        browser = Browser()
        offer = await browser.offer()
        headers = {"content-type": "application/sdp"}
        assert (await http.post(PATH, content=offer, headers=headers)).status_code == 201
        await asyncio.wait_for(orchestrator.session.closed.wait(), 25)
        await browser.connection.close()


async def test_a_full_server_says_so_before_it_answers():
    async with serving() as (http, orchestrator):
        orchestrator.n_more = 0
        response = await Browser().connect(http)
        assert (response.status_code, response.json()["error"]["code"]) == (
            503,
            "server_overloaded",
        )


async def test_speech_at_another_speed_is_sent_in_its_time():
    session = {"type": "realtime", "audio": {"output": {"speed": 1.5}}}
    files = {"session": (None, json.dumps(session), "application/json")}
    async with (
        serving(spoken("It rains.", 2400)) as (http, _),
        calling(http, files=files) as browser,
    ):
        browser.send("response.create")
        await browser.until(STOPPED)
        await asyncio.sleep(0.3)
        assert len(browser.sound()) / SENT_RATE_HZ == pytest.approx(1.7, abs=0.1)


@pytest.mark.parametrize("event", ["input_audio_buffer.append", "session.update"])
async def test_audio_in_events_and_other_forms_of_it_are_refused(event):
    async with serving() as (http, _), calling(http) as browser:
        if event == "session.update":
            form = {"audio": {"output": {"format": {"type": "audio/pcmu"}}}}
            browser.send(event, session={"type": "realtime", **form})
        else:
            browser.send(event, audio="AAAA")
        error = (await browser.find("error"))["error"]
        assert error["param"] in ("type", "session.audio.output.format")
