"""The page where https, a key or the network is missing; a script answers."""

import pytest

from test.e2e.browser import visit
from test.e2e.scripted_page import KEEP, LOSE, ask, page_of, says, status
from test.unit.gateway.fakes import FakeOrchestrator, app_of, full, spoken
from test.unit.gateway.live_server import listening

pytestmark = [pytest.mark.e2e]

# A name that is not loopback, and leads there nevertheless.
_ELSEWHERE = ("--host-resolver-rules=MAP page.test 127.0.0.1",)
_IMPATIENT = "const wait = setTimeout; window.setTimeout = (then, ms) => wait(then, ms / 50);"


async def test_without_https_it_says_so_and_is_written_to():
    orchestrator = FakeOrchestrator([spoken("In writing.")])
    async with listening(app_of(orchestrator)) as address:
        port = address.rpartition(":")[2]
        async with visit(f"http://page.test:{port}/", flags=_ELSEWHERE) as client:
            page = client.page
            assert not await page.evaluate("isSecureContext")
            assert "needs https, or localhost" in await client.text("#no-sound")
            assert await page.is_disabled("#talk") and await page.is_disabled("#clip")
            await ask(client, "Is anybody there?")
            await client.answered(0)
            await status(client, "connected")
            await says(client, "In writing.")
            assert not orchestrator.turns[0].wants_audio
            await page.keyboard.press("Escape")
            await page.click("#talk")
            await status(client, "not connected")
            assert (await client.lines("server"), client.complaints) == ([], [])


async def test_any_key_is_changed_for_a_secret_and_travels_in_no_socket():
    key = "sk/with+all=of it"
    offered = []
    inner = app_of(FakeOrchestrator([spoken("Yes.", 800)]), api_keys=(key,))

    async def app(scope, receive, send):
        if scope["type"] == "websocket":
            offered.extend(scope["subprotocols"])
        await inner(scope, receive, send)

    async with page_of(app) as client:
        await ask(client, "Is anybody there?")
        await client.page.wait_for_selector("#key-form:visible")
        await client.page.fill("#key", key)
        await client.page.press("#key", "Enter")
        await client.until(client.is_heard, "what was typed before the key is answered")
        assert await client.page.input_value("#key") == ""
        await client.page.wait_for_selector("#sessions:text('1')")  # counts are for key holders
    assert offered[0] == "realtime"
    assert offered[1].startswith("openai-insecure-api-key.ek_")
    assert len(offered) == 2


async def test_a_server_that_forgot_its_secrets_is_given_the_key_again():
    apps = [app_of(FakeOrchestrator([spoken("Yes.", 800)]), api_keys=("right",)) for _ in range(2)]

    async def app(scope, receive, send):
        await apps[0](scope, receive, send)

    async with page_of(app) as client:
        page = client.page
        await ask(client, "Is anybody there?")
        for _ in range(2):
            await page.wait_for_selector("#key-form:visible")
            await page.fill("#key", "right")
            await page.press("#key", "Enter")
            await status(client, "connected")
            await page.wait_for_selector("#key-form", state="hidden")
            apps.reverse()
            await page.evaluate(LOSE)
        await page.wait_for_selector("#key-form:visible")
        assert all("401" in told or "WebSocket" in told for told in client.complaints)


async def test_a_lost_connection_is_made_anew_and_what_was_said_stays_to_be_read():
    orchestrator = FakeOrchestrator([spoken("First.", 800), spoken("Second.", 800)])
    async with page_of(app_of(orchestrator)) as client:
        await ask(client, "one")
        await says(client, "First.")
        await client.page.evaluate(LOSE)
        await status(client, "trying again, 1 of 5")
        await ask(client, "two")  # is sent when there is a connection again
        await says(client, "Second.")
        await says(client, "First.")  # still
        [told] = await client.lines("page")
        assert "connection was lost" in told
        assert len(orchestrator.sessions) == 2
        assert client.complaints == []


async def test_a_server_that_stays_away_is_given_up():
    orchestrator, is_up = FakeOrchestrator([spoken("First.", 800)]), True
    inner = app_of(orchestrator)

    async def app(scope, receive, send):
        if is_up:
            await inner(scope, receive, send)
        else:
            kind = "websocket.close" if scope["type"] == "websocket" else "http.response.start"
            await send({"type": kind, "status": 503, "headers": []})
            if scope["type"] == "http":
                await send({"type": "http.response.body"})

    async with page_of(app, script=KEEP + _IMPATIENT) as client:
        await ask(client, "one")
        await says(client, "First.")
        is_up = False
        await client.page.evaluate(LOSE)
        await client.page.wait_for_selector("#talk:text-is('Talk')")
        assert await client.text("#status") == "the server answers 503"
        is_up = True
        await ask(client, "two")
        await says(client, "All right.")


async def test_who_hangs_up_while_it_tries_again_is_left_alone():
    orchestrator = FakeOrchestrator([spoken("First.", 800)])
    async with page_of(app_of(orchestrator)) as client:
        await ask(client, "one")
        await says(client, "First.")
        await client.page.evaluate(LOSE)
        await status(client, "trying again, 1 of 5")
        await client.page.click("#talk")
        await status(client, "not connected")
        await client.page.click("#talk")
        await status(client, "connected to")
        assert len(orchestrator.sessions) == 2
        assert client.complaints == []


async def test_a_refusal_is_told_and_not_asked_again():
    orchestrator = FakeOrchestrator(refuse_with=full())
    async with page_of(app_of(orchestrator)) as client:
        await client.page.click("#talk")
        await status(client, "full: 2 of 2 sessions")
        assert await client.text("#talk") == "Talk"
        orchestrator.refuse_with = None
        await client.page.click("#talk")
        await status(client, "connected to")
        await client.page.evaluate(LOSE)
        orchestrator.refuse_with = full()
        await status(client, "full: 2 of 2 sessions")
        assert await client.text("#talk") == "Talk"
