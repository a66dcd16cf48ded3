"""The page over WebRTC, with a scripted gateway: sound on a track, and sockets where it fails."""

import asyncio
import importlib.util
import re

import pytest

from sglang_live.interaction.silero import SileroModel
from test.e2e.browser import Visit, microphone
from test.e2e.scripted_page import KEEP, ask, page_of, says, status
from test.turn_server import PASSWORD, USER, relaying
from test.unit.gateway.fakes import FakeOrchestrator, app_of, spoken

pytestmark = [pytest.mark.e2e]

# As where UDP does not pass: the answer names a port where nothing listens.
_BLOCKED = r"""
const answered = RTCPeerConnection.prototype.setRemoteDescription;
RTCPeerConnection.prototype.setRemoteDescription = function ({ type, sdp }) {
  sdp = sdp.replace(/(candidate:.* 127\.0\.0\.1) \d+/g, "$1 9");
  return answered.call(this, { type, sdp });
};
"""
# As where the server has no address that the browser reaches.
_RELAYED = r"""
const answered = RTCPeerConnection.prototype.setRemoteDescription;
RTCPeerConnection.prototype.setRemoteDescription = function ({ type, sdp }) {
  sdp = sdp.replace(/a=candidate:.* typ host.*\r\n/g, "");
  return answered.call(this, { type, sdp });
};
"""


def scripted(*scripts: list) -> FakeOrchestrator:
    return FakeOrchestrator([*scripts], n_more=5)


async def is_over(client: Visit) -> bool:
    return await client.text("#status") == "connected" and await client.page.is_disabled("#stop")


async def is_measured(client: Visit) -> bool:
    return await client.text("#network") != "–"


async def cut_after(client: Visit) -> float:
    """Seconds of the interrupted response that were heard, as the server knows it."""
    lines = " ".join(await client.lines("model"))
    found = re.search(r"interrupted, heard ([\d.]+) s", lines)
    return float(found[1]) if found else 0.0


async def test_a_spoken_question_is_answered_and_the_line_is_shown(tmp_path):
    orchestrator = scripted(spoken("Yes.", 2000))
    sound = microphone(tmp_path / "said.wav", "sp_librivox_0880.flac", before_s=4.0)
    app = app_of(orchestrator, speech_model=SileroModel())
    async with page_of(app, sound, calls=True) as client:
        page = client.page
        await page.click("#talk")
        await status(client, "connected to")
        await says(client, "Yes.")
        await client.until(lambda: is_over(client), "the response is over")
        await client.until(lambda: is_measured(client), "the line is measured")
        assert await client.text("#line") == "WebRTC"
        lost = re.fullmatch(r"([\d.]+) %, (\d+) ms", await client.text("#network"))
        assert lost and float(lost[1]) < 20 and int(lost[2]) < 200
        assert re.fullmatch(r"\d+ ms", await client.text("#ttfp"))
        # Pauses that a busy machine makes are a part of it.
        assert 1.7 < await client.seconds("heard") < 8
        [said] = await client.lines("you")
        assert re.search(r"spoke for \d\.\d s", said)
        assert not [url for url in client.asked if url.startswith("ws")]
        assert await client.lines("server") == client.complaints == []
        await page.click("#talk")
        assert await client.text("#status") == "not connected"
        await asyncio.wait_for(orchestrator.session.closed.wait(), 5)


async def test_speaking_and_the_stop_button_interrupt():
    scripts = [spoken("A long story.", 20_000), spoken("Another long one.", 20_000)]
    app = app_of(scripted(*scripts), speech_model=SileroModel())
    async with page_of(app, calls=True) as client:
        await ask(client, "Tell me a story.")
        await says(client, "A long story.")
        await asyncio.sleep(1.0)
        await client.page.click("#clip")
        await says(client, "Another long one.")
        assert 0.5 < await cut_after(client) < 10
        await client.page.wait_for_selector("#hint:text('Press Stop')")
        await client.page.click("#stop")
        await client.page.wait_for_selector("#stop:disabled")
        assert await client.lines("server") == []


async def test_the_live_api_is_spoken_over_a_call():
    app = app_of(scripted(spoken("Yes.", 1500), spoken("A long story.", 20_000)))
    async with page_of(app, calls=True) as client:
        page = client.page
        await page.select_option("#protocol", "live")
        await ask(client, "Is anyone there?")
        await says(client, "Yes.")
        await client.until(lambda: is_over(client), "the response is over")
        # The pause by which an answer ends is a part of it.
        assert 1.4 < await client.seconds("heard") < 8
        assert await client.text("#line") == "WebRTC"
        await ask(client, "Tell me a story.")
        await page.wait_for_selector("#stop:enabled")
        await page.click("#stop")
        await page.wait_for_selector("#stop:disabled")
        assert await client.lines("server") == client.complaints == []
        await page.click("#talk")
        assert await client.text("#status") == "not connected"


async def test_where_only_a_relay_is_reached_a_call_serves():
    async with relaying() as relay:
        turn = {"turn_url": relay.url, "turn_username": USER, "turn_password": PASSWORD}
        app = app_of(scripted(spoken("Yes.", 1500)), **turn)
        async with page_of(app, script=KEEP + _RELAYED, calls=True) as client:
            await ask(client, "Is anyone there?")
            await says(client, "Yes.")
            await client.until(lambda: is_over(client), "the response is over")
            assert await client.text("#line") == "WebRTC"
            assert relay.n_relayed > 50
            assert await client.lines("server") == client.complaints == []


async def test_where_no_udp_passes_a_socket_serves():
    orchestrator = scripted(spoken("Yes.", 800))
    async with page_of(app_of(orchestrator), script=KEEP + _BLOCKED, calls=True) as client:
        await ask(client, "Is anyone there?")
        await client.until(client.is_heard, "there is a response")
        assert await client.text("#line") == "WebSocket"
        assert orchestrator.sessions[0].n_closed == 1  # the call that did not connect
        assert len(orchestrator.sessions) == 2
        await client.page.click("#talk")
        await client.page.click("#talk")
        await status(client, "connected to")
        assert len(orchestrator.sessions) == 3  # no second try
        assert await client.lines("server") == []


async def test_a_server_without_webrtc_serves_a_socket(monkeypatch):
    find = importlib.util.find_spec
    without = lambda name: None if name == "aiortc" else find(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", without)
    async with page_of(app_of(scripted(spoken("Yes.", 800))), calls=True) as client:
        await ask(client, "Is anyone there?")
        await client.until(client.is_heard, "there is a response")
        await client.until(lambda: is_measured(client), "the line is named")
        assert await client.text("#line") == "WebSocket"


async def test_microphone_and_voice_are_chosen(tmp_path):
    orchestrator = scripted(spoken("Yes.", 800))
    sound = microphone(tmp_path / "said.wav", "sp_librivox_0880.flac", before_s=60)
    async with page_of(app_of(orchestrator), sound, calls=True) as client:
        page = client.page
        await page.select_option("#voice", "bob")
        await page.click("#talk")
        await page.wait_for_selector("#microphone:visible")
        assert await page.is_disabled("#voice")
        names = await page.locator("#microphone option").all_inner_texts()
        await page.select_option("#microphone", index=len(names) - 1)

        async def has_changed() -> bool:
            return await page.evaluate("kept.tracks.length") == 2

        await client.until(has_changed, "another microphone is used")
        states = await page.evaluate("kept.tracks.map((track) => track.readyState)")
        assert states == ["ended", "live"]
        await ask(client, "Is anyone there?")
        await says(client, "Yes.")
        assert orchestrator.turns[0].voice == "bob"


async def test_a_call_that_the_server_ends_is_over():
    orchestrator = scripted(spoken("Yes.", 800))
    async with page_of(app_of(orchestrator), calls=True) as client:
        async with client.page.expect_response("**/v1/realtime/calls") as answered:
            await client.page.click("#talk")
        place = (await answered.value).headers["location"]
        await status(client, "connected to")
        await client.page.evaluate("(place) => fetch(`${place}/hangup`, {method: 'POST'})", place)
        await status(client, "the server has ended the call")
        assert await client.text("#talk") == "Talk"
