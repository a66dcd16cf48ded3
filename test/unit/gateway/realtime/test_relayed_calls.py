"""Calls through a relay: the server's own address is out of the client's reach."""

import asyncio

import pytest

from sglang_live.errors import BadInputError
from sglang_live.gateway.webrtc.config import WebRtcConfig
from test.calls import Browser, calling, calling_live
from test.turn_server import PASSWORD, USER, relaying
from test.unit.gateway.fakes import spoken
from test.unit.gateway.realtime.test_calls import STOPPED, VOICE, serving


def through(url: str, password: str = PASSWORD) -> dict[str, str]:
    return {"turn_url": url, "turn_username": USER, "turn_password": password}


async def test_a_user_is_heard_and_answered_through_a_relay():
    async with (
        relaying() as relay,
        serving(spoken("It rains.", 800), **through(relay.url)) as (http, orchestrator),
    ):
        async with calling(http, kinds=("relay",)) as browser:
            assert len(relay.users) == 1
            browser.microphone.say(VOICE)
            await browser.until(STOPPED)
            await asyncio.sleep(0.3)
            assert len(browser.heard) > 30 and relay.n_relayed > 60
            assert orchestrator.turns[0].history[0].parts[0].duration_s > 0.7
        await asyncio.wait_for(orchestrator.session.closed.wait(), 15)
        async with asyncio.timeout(30):
            while relay.users:  # a call leaves nothing there
                await asyncio.sleep(0.05)


async def test_a_live_session_too():
    async with (
        relaying() as relay,
        serving(**through(relay.url)) as (http, _),
        calling_live(http, kinds=("relay",)),
    ):
        assert relay.n_relayed > 0


async def test_a_relay_lets_only_the_address_through_that_asked():
    """What a proxy says of the client's address is what the relay is told."""
    elsewhere = {"x-forwarded-for": "192.0.2.7"}
    async with (
        relaying() as relay,
        serving(**through(relay.url)) as (http, _),
    ):
        browser = Browser(kinds=("relay",))
        try:
            assert (await browser.connect(http, headers=elsewhere)).status_code == 201
            async with asyncio.timeout(10):
                while not relay.n_refused:
                    await asyncio.sleep(0.05)
            [peers] = relay.users.values()
            assert peers.allowed == {"192.0.2.7"} and relay.n_relayed == 0
        finally:
            await browser.connection.close()


@pytest.mark.parametrize("password", ["wrong", PASSWORD])
async def test_without_the_relay_a_call_is_served_directly(password, caplog):
    """The relay refuses the server, or is not there."""
    async with relaying() as relay:
        url = relay.url if password == "wrong" else "turn:127.0.0.1:9"
        async with (
            serving(spoken("Yes."), **through(url, password)) as (http, _),
            calling(http) as browser,
        ):
            browser.send("response.create")
            await browser.until("response.done")
            assert relay.users == {}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"turn_url": "stun:relay.example"}, "none as turn:HOST"),
        ({"turn_url": "turn:[2001:db8::1]:3478"}, "none as turn:HOST"),
        ({"turn_url": "turns:relay.example?transport=udp"}, "none as turn:HOST"),
        ({"turn_url": "turn:relay.example"}, "needs --turn-username"),
        ({"turn_url": "turn:relay.example", "turn_username": "u"}, "needs --turn-username"),
    ],
)
def test_a_relay_that_cannot_be_used_is_refused_at_the_start(settings, why):
    with pytest.raises(BadInputError, match=why):
        WebRtcConfig(**settings).check()
    for url in ("turn:relay.example", "turns:relay.example:443?transport=tcp"):
        WebRtcConfig(**through(url)).check()
