"""Phone calls through the services' sockets, with a scripted model."""

import asyncio
import base64
import json
import random
from contextlib import asynccontextmanager, suppress

import httpx
import numpy as np
import pytest
import soxr
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from sglang_live.core import AudioDelta
from sglang_live.gateway.telephony.config import TelephonyConfig
from test.phones import (
    RATE_HZ,
    Asterisk,
    AsteriskJson,
    Plain,
    Service,
    Telnyx,
    Twilio,
    mutated_frame,
    phoning,
    signature,
)
from test.unit.gateway.fakes import FakeOrchestrator, app_of, done, paced, spoken, tone, voice
from test.unit.gateway.live_server import listening

TOKEN = "12345"
SENT = {"authorization": f"Bearer {TOKEN}"}
ALL = (Twilio, Telnyx, Asterisk, AsteriskJson, Plain)
KINDS = pytest.mark.parametrize("kind", ALL, ids=[kind.__name__ for kind in ALL])


def at_8k(pcm: bytes) -> np.ndarray:
    return soxr.resample(np.frombuffer(pcm, "<i2"), 24_000, RATE_HZ).astype(np.int16)


VOICE = np.clip(at_8k(voice(800)) * 3.0, -20_000, 20_000).astype(np.int16)


def signed(address: str, path: str = Twilio.path, token: str = TOKEN) -> dict[str, str]:
    return signature(f"{address}{path}", token)


@asynccontextmanager
async def serving(*scripts: list, keys_as_text: bool = False, url: str = "", **config):
    orchestrator = FakeOrchestrator([*scripts], n_more=5)
    telephony = TelephonyConfig(
        telephony_token=TOKEN, telephony_keys_as_text=keys_as_text, telephony_url=url
    )
    async with listening(app_of(orchestrator, telephony=telephony, **config)) as address:
        yield address, orchestrator


def admission(kind: type[Service], address: str) -> dict[str, str]:
    return signed(f"ws://{address}") if kind is Twilio else SENT


@asynccontextmanager
async def calling(kind: type[Service], address: str):
    async with phoning(kind, address, admission(kind, address)) as service:
        yield service


@KINDS
async def test_a_user_is_heard_and_answered(kind):
    async with serving(spoken("It rains.", 800)) as (address, orchestrator):
        async with calling(kind, address) as service:
            service.say(VOICE)
            await service.until_played(0.8)
            await asyncio.sleep(0.3)
            sound = service.sound()
            assert len(sound) / RATE_HZ == pytest.approx(0.8, abs=0.05)
            spectrum = np.abs(np.fft.rfft(sound[800:5600]))
            assert spectrum.argmax() * RATE_HZ / 4800 == pytest.approx(300, abs=20)
            [turn] = orchestrator.turns
            assert turn.history[0].parts[0].duration_s > 0.7
            assert turn.wants_audio
        await asyncio.wait_for(orchestrator.session.closed.wait(), 30)


@KINDS
async def test_an_interruption_drops_what_waits_and_the_marks_say_what_was_heard(kind):
    long = [*paced("one two", 0)[:2], *(AudioDelta(tone(80)) for _ in range(100)), done("one two")]
    async with (
        serving(long, spoken("Yes?", 400)) as (address, orchestrator),
        calling(kind, address) as service,
    ):
        service.say(VOICE)
        await service.until_played(1.0)
        service.say(VOICE)
        async with asyncio.timeout(10):
            while len(orchestrator.turns) < 2:
                await asyncio.sleep(0.02)
        n_played = len(service.played)
        assert 1.0 < n_played / RATE_HZ < 4.0
        # On a busy machine all may have been played while a suspected voice held the rest back.
        is_due = kind is not Plain and not service.ran_dry
        assert service.n_clears <= (kind is not Plain) and service.n_clears >= is_due
        # Little waits at the service, so that a suspected voice holds the rest back.
        assert service.longest_wait_s < (0.3 if kind is Plain else 1.5)
        await service.until_played(n_played / RATE_HZ + 0.3)


async def test_the_server_knows_what_was_heard():
    long = [*paced("one two", 0)[:2], *(AudioDelta(tone(80)) for _ in range(100)), done("one two")]
    async with (
        serving(long, spoken("Yes?", 400)) as (address, orchestrator),
        calling(Twilio, address) as service,
        sideband(address, orchestrator) as events,
    ):
        service.say(VOICE)
        await service.until_played(1.0)
        service.say(VOICE)
        cleared = await events("output_audio_buffer.cleared")
        cut = await events("conversation.item.truncated")
        played_ms = 1000 * len(service.played) / RATE_HZ
        assert cut["audio_end_ms"] == pytest.approx(played_ms, abs=450)
        assert cleared["response_id"]


@asynccontextmanager
async def sideband(address: str, orchestrator: FakeOrchestrator):
    """Waits for events of the call. Twilio's name of the call is its id."""
    async with asyncio.timeout(10):
        while not orchestrator.sessions:
            await asyncio.sleep(0.02)
    url = f"ws://{address}/v1/realtime?call_id={Twilio.call}"
    async with connect(url) as socket:

        async def find(kind: str) -> dict:
            async with asyncio.timeout(20):
                while True:
                    event = json.loads(await socket.recv())
                    if event["type"] == kind:
                        return event

        find.socket = socket
        yield find


async def test_an_application_steers_the_call_by_its_sideband_and_hangs_up():
    async with (
        serving(spoken("Good morning.", 800)) as (address, orchestrator),
        calling(Twilio, address) as service,
        sideband(address, orchestrator) as events,
    ):
        await events.socket.send('{"type": "response.create"}')
        said = await events("response.output_audio_transcript.done")
        assert said["transcript"] == "Good morning."
        await events("output_audio_buffer.stopped")
        await service.until_played(0.75)
        async with httpx.AsyncClient() as http:
            path = f"/v1/realtime/calls/{Twilio.call}/hangup"
            assert (await http.post(f"http://{address}{path}")).status_code == 200
        await asyncio.wait_for(service.socket.wait_closed(), 30)
        assert orchestrator.session.n_closed == 1


@KINDS
async def test_keys_are_events_and_by_a_flag_text(kind):
    async with (
        serving(spoken("Thank you.", 400), keys_as_text=True) as (address, orchestrator),
        calling(kind, address) as service,
    ):
        for digit in "42#":
            await service.press(digit)
        await service.until_played(0.35)
        [asked] = orchestrator.turns[0].history
        assert asked.parts[0].text == "The user has pressed these keys: 4 2"


async def test_a_key_is_an_event_for_the_sideband():
    async with (
        serving() as (address, orchestrator),
        calling(Twilio, address) as service,
        sideband(address, orchestrator) as events,
    ):
        await service.press("5")
        event = await events("input_audio_buffer.dtmf_event_received")
        assert (event["event"], event.keys()) == ("5", {"type", "event", "received_at"})
        assert orchestrator.turns == []


@pytest.mark.parametrize("kind", [Asterisk, AsteriskJson])
async def test_asterisk_is_told_of_the_end(kind):
    async with serving(idle_session_s=0.3) as (address, _):
        headers = {"authorization": "Basic " + base64.b64encode(f"a:{TOKEN}".encode()).decode()}
        async with connect(f"ws://{address}{kind.path}", additional_headers=headers) as socket:
            service = kind(socket)
            await service.event("MEDIA_START", connection_id="one", format="alaw")
            with pytest.raises(ConnectionClosed):
                while True:
                    await service.take(await socket.recv())
            assert service.told == ["HANGUP"]


async def test_who_may_call():
    for kind in ALL:
        async with serving() as (address, orchestrator):
            for headers in ({}, {"authorization": "Bearer wrong"}, signed(f"ws://{address}x")):
                with pytest.raises(InvalidStatus) as refused:
                    await connect(f"ws://{address}{kind.path}", additional_headers=headers)
                assert refused.value.response.status_code == 401
            assert orchestrator.sessions == []


async def test_a_signature_is_of_the_public_address():
    async with serving(url="wss://voice.example/") as (address, _):
        url = f"ws://{address}{Twilio.path}"
        async with connect(url, additional_headers=signed("wss://voice.example")):
            pass
        for wrong in (signed(f"ws://{address}"), signed("wss://voice.example", token="other")):
            with pytest.raises(InvalidStatus):
                await connect(url, additional_headers=wrong)


async def test_without_a_token_a_key_is_needed_and_without_keys_there_are_no_phones():
    for keys, status in (((), 403), (("k",), 401)):
        app = app_of(FakeOrchestrator(n_more=5), api_keys=keys)
        async with listening(app) as address:
            with pytest.raises(InvalidStatus) as refused:
                await connect(f"ws://{address}{Plain.path}")
            assert refused.value.response.status_code in (status, 404)
            if keys:
                bearer = {"authorization": "Bearer k"}
                async with connect(f"ws://{address}{Plain.path}", additional_headers=bearer):
                    pass


@pytest.mark.parametrize(
    ("kind", "frames", "code"),
    [
        (Twilio, ["{"], "invalid_phone_frame"),
        (Twilio, ["[]"], "invalid_phone_frame"),
        (Twilio, ['{"event": "start"}'], "invalid_phone_frame"),
        (
            Telnyx,
            ['{"event": "start", "start": {"call_control_id": "x", "media_format": '
             '{"encoding": "OPUS"}}}'],
            "invalid_phone_frame",
        ),
        (Asterisk, ["MEDIA_START connection_id:x format:opus"], "invalid_phone_frame"),
        (Asterisk, ["MEDIA_START format:ulaw"], "invalid_phone_frame"),
        (Plain, [b"\xff", "hello"], "invalid_phone_frame"),
    ],
)  # fmt: skip
async def test_what_is_no_call_is_refused_by_its_reason(kind, frames, code):
    async with serving() as (address, orchestrator):
        url, headers = f"ws://{address}{kind.path}", admission(kind, address)
        async with connect(url, additional_headers=headers) as socket:
            for frame in frames:
                await socket.send(frame)
            with pytest.raises(ConnectionClosed) as closed:
                while True:
                    await asyncio.wait_for(socket.recv(), 10)
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1008, code)
        assert all(session.n_closed for session in orchestrator.sessions)


@KINDS
async def test_a_socket_takes_any_frame_and_the_next_call_is_served(kind):
    rng = random.Random(3)
    async with serving(*[spoken("Yes.", 800)] * 20) as (address, orchestrator):
        url, headers = f"ws://{address}{kind.path}", admission(kind, address)
        for _ in range(15):
            async with connect(url, additional_headers=headers) as socket:
                with suppress(ConnectionClosed):
                    for _ in range(20):
                        frame = mutated_frame(rng)
                        await socket.send(frame if rng.random() < 0.8 else frame.encode())
        async with asyncio.timeout(10):
            while not all(session.n_closed for session in orchestrator.sessions):
                await asyncio.sleep(0.05)
        async with calling(kind, address) as service:
            service.say(VOICE)
            await service.until_played(0.3)


async def test_unknown_services_and_parameters_are_refused():
    async with serving() as (address, _):
        for path, status in (("/v1/telephony/other", 404), (f"{Plain.path}?rate=16000", 400)):
            with pytest.raises(InvalidStatus) as refused:
                await connect(f"ws://{address}{path}", additional_headers=SENT)
            assert refused.value.response.status_code == status
