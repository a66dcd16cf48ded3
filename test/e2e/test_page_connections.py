"""The page without https, without a key or without a network, with a scripted gateway."""

import pytest

from test.e2e.browser import visit
from test.e2e.scripted_page import KEEP, LOSE, ask, page_of, says, status
from test.unit.client.cutter import Cutter
from test.unit.gateway.fakes import FakeOrchestrator, app_of, full, spoken
from test.unit.gateway.live_server import listening

pytestmark = [pytest.mark.e2e]

# A name that is not loopback but resolves to it.
_ELSEWHERE = ("--host-resolver-rules=MAP page.test 127.0.0.1",)
_IMPATIENT = "const wait = setTimeout; window.setTimeout = (then, ms) => wait(then, ms / 50);"


async def test_without_https_the_page_explains_it_and_accepts_text():
    orchestrator = FakeOrchestrator([spoken("In writing.")])
    async with listening(app_of(orchestrator)) as address:
        port = address.rpartition(":")[2]
        async with visit(f"http://page.test:{port}/", flags=_ELSEWHERE) as client:
            page = client.page
            assert not await page.evaluate("isSecureContext")
            assert "needs https, or localhost" in await client.text("#no-sound")
            assert await page.is_disabled("#talk") and await page.is_disabled("#clip")
            await ask(client, "Is anyone there?")
            await client.responded(0)
            await status(client, "connected")
            await says(client, "In writing.")
            assert not orchestrator.turns[0].wants_audio
            await page.keyboard.press("Escape")
            await page.click("#talk")
            await status(client, "not connected")
            assert (await client.lines("server"), client.complaints) == ([], [])


async def test_any_key_is_exchanged_for_a_secret_and_is_sent_in_no_socket():
    key = "sk/with+all=of~it"
    offered = []
    inner = app_of(FakeOrchestrator([spoken("Yes.", 800)]), api_keys=(key,))

    async def app(scope, receive, send):
        if scope["type"] == "websocket":
            offered.extend(scope["subprotocols"])
        await inner(scope, receive, send)

    async with page_of(app) as client:
        await ask(client, "Is anyone there?")
        await client.page.wait_for_selector("#key-form:visible")
        await client.page.fill("#key", key)
        await client.page.press("#key", "Enter")
        await client.until(client.is_heard, "text that was typed before the key gets a response")
        assert await client.page.input_value("#key") == ""
        await client.page.wait_for_selector("#sessions:text('1')")  # counts are for key holders
    assert offered[0] == "realtime"
    assert offered[1].startswith("openai-insecure-api-key.ek_")
    assert len(offered) == 2


async def test_the_key_is_sent_again_to_a_server_without_the_secret():
    apps = [app_of(FakeOrchestrator([spoken("Yes.", 800)]), api_keys=("right",)) for _ in range(2)]

    async def app(scope, receive, send):
        await apps[0](scope, receive, send)

    async with page_of(app) as client:
        page = client.page
        await ask(client, "Is anyone there?")
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


async def test_a_lost_connection_is_reopened_and_the_transcript_stays():
    orchestrator = FakeOrchestrator([spoken("First.", 800), spoken("Second.", 800)])
    async with page_of(app_of(orchestrator)) as client:
        await ask(client, "one")
        await says(client, "First.")
        await client.page.evaluate(LOSE)
        await status(client, "trying again, 1 of 5")
        await ask(client, "two")  # is sent after the reconnection
        await says(client, "Second.")
        await says(client, "First.")  # still
        [told] = await client.lines("page")
        assert "connection was lost" in told
        assert len(orchestrator.sessions) == 2
        assert client.complaints == []


async def test_a_response_goes_on_when_the_network_loses_the_connection():
    orchestrator = FakeOrchestrator([spoken("First.", 4000), spoken("Second.", 800)])
    async with listening(app_of(orchestrator)) as address:
        cutter = Cutter(address)
        async with cutter.listening() as lossy, visit(f"http://{lossy}/") as client:
            await client.page.wait_for_selector("#talk")
            await ask(client, "one")
            await client.until(client.is_heard, "a response is heard")
            cutter.cut()
            await status(client, "trying again, 1 of 5")
            await ask(client, "two")  # is sent when the session goes on, and ends the response
            await says(client, "First.")
            await says(client, "Second.")
            await client.until(client.is_over, "all is heard")
            assert await client.seconds("heard") == 0.8
            assert await client.lines("page") == await client.lines("server") == []
    assert len(orchestrator.sessions) == 1


async def test_all_of_a_response_is_heard_once_if_its_connection_is_lost():
    orchestrator = FakeOrchestrator([spoken("First.", 4000)])
    async with listening(app_of(orchestrator)) as address:
        cutter = Cutter(address)
        async with cutter.listening() as lossy, visit(f"http://{lossy}/") as client:
            await client.page.wait_for_selector("#talk")
            await ask(client, "one")
            await client.until(client.is_heard, "a response is heard")
            for _ in range(2):
                cutter.cut()
                await status(client, "trying again")
                await status(client, "connected")
            await client.until(client.is_over, "all is heard")
            assert await client.seconds("heard") == 4.0
            assert await client.lines("page") == []
    assert len(orchestrator.sessions) == 1


async def test_reconnecting_ends_after_the_last_attempt():
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
        assert await client.text("#status") == "the server returned status 503"
        is_up = True
        await ask(client, "two")
        await says(client, "All right.")


async def test_a_user_who_hangs_up_ends_the_attempts_to_reconnect():
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


async def test_a_refusal_is_shown_and_not_retried():
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


async def test_the_page_says_what_the_model_is_and_asks_a_suggested_question():
    orchestrator = FakeOrchestrator([spoken("Scattering.", 800)])
    app = app_of(orchestrator, about="A small model.", suggestions=("Why is the sky blue?",))
    async with page_of(app) as client:
        await client.page.wait_for_selector("#about:text('A small model.')")
        await client.page.click("#suggestions button:text('Why is the sky blue?')")
        await says(client, "Scattering.")
        [asked] = orchestrator.turns[0].history
        assert asked.parts[0].text == "Why is the sky blue?"
        assert client.complaints == []


async def test_a_server_with_keys_says_nothing_of_its_model_without_one():
    app = app_of(FakeOrchestrator([]), api_keys=("secret",), about="Ours.", suggestions=("Why?",))
    async with page_of(app) as client:
        await client.page.wait_for_function(
            "performance.getEntriesByName(new URL('/page/model.json', location).href).length"
        )
        assert await client.page.is_hidden("#about") and await client.page.is_hidden("#suggestions")
