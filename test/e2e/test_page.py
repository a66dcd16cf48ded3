"""The page in a browser, with the whole server."""

import re

import pytest

from test.e2e.browser import microphone, visit
from test.unit.gateway.fakes import FakeOrchestrator, app_of, done, spoken
from test.unit.gateway.live_server import listening

pytestmark = [pytest.mark.e2e]

PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}
# WCAG 2.2, success criterion 2.5.8, requires 24; 44 is comfortable for thumbs.
_LEAST_TARGET_PX = 44
# Left, top, right and bottom of the visible elements of a selector.
_PLACES = """selector => [...document.querySelectorAll(selector)]
  .filter((one) => one.checkVisibility())
  .map((one) => one.getBoundingClientRect())
  .map((box) => [box.left, box.top, box.right, box.bottom])"""
_WRITE = """texts => Object.entries(texts)
  .forEach(([id, text]) => (document.getElementById(id).textContent = text))"""


async def test_a_session_of_three_turns_with_an_interruption(server, tmp_path):
    sound = microphone(tmp_path / "said.wav", "sp_librivox_0880.flac")
    async with visit(server.http, sound) as client:
        await client.page.click("#talk")
        await client.until(client.is_heard, "the microphone's question gets a response")
        first_sound = await client.text("#ttfp")
        await client.interrupt()
        await client.until(client.is_over, "the response to the interruption is over")
        n_responses = len(await client.lines("model"))
        await client.page.fill("#text", "And a typed question?")
        await client.page.press("#text", "Enter")
        await client.responded(n_responses)
        await client.until(client.is_over, "the response to the typed question is over")
        you, model = await client.lines("you"), await client.lines("model")
        urgency, clients = await client.text("#urgency"), await client.text("#sessions")
        server_lines = await client.lines("server")
        await client.page.click("#talk")
        assert await client.text("#status") == "not connected"
    assert re.fullmatch(r"\d+ ms", first_sound)
    assert re.search(r"spoke for \d+\.\d s", you[0])
    assert "And a typed question?" in you[-1]
    assert all(len(line) > len("model ") for line in model)
    cut = [line for line in model if "interrupted, heard" in line]
    assert cut and 0.2 <= float(re.search(r"heard ([\d.]+) s", cut[0])[1]) < 60
    assert (clients, server_lines) == ("1", [])
    assert re.fullmatch(r"\d+ %|none", urgency)
    assert client.complaints == []
    own = (server.http, server.ws, "data:")
    assert [address for address in client.asked if not address.startswith(own)] == []
    server.wait_until_free()


async def test_without_a_microphone_the_recorded_question_is_sent(server):
    async with visit(server.http) as client:
        await client.page.click("#talk")
        await client.page.wait_for_selector("#transcript .note")
        assert "no microphone" in await client.text("#transcript")
        await client.page.click("#clip")
        await client.until(client.is_heard, "the recording gets a response")
        await client.page.keyboard.press("Escape")

        async def stopped() -> bool:
            return await client.seconds("discarded") > 0 or await client.is_over()

        await client.until(stopped, "Escape ends the response")
        assert client.complaints == []


async def test_no_control_touches_another_and_numbers_move_nothing():
    app = app_of(FakeOrchestrator([]), about="Ours.", suggestions=("Why?", "Where?"))
    moved, told = ".gauges div, .legend li, section, #mute", {"talk": "Hang up", "ttfp": "12345 ms"}
    told |= {"buffer": "123.4 s", "sessions": "1024", "urgency": "100 %", "heard": "123.4 s"}
    told |= {"line": "WebSocket", "network": "100.0 %, 1234 ms"}
    told |= {"kv": "123456789 tokens, 123456789 on the host, 123456789 on disk"}
    async with listening(app) as address, visit(f"http://{address}/") as client:
        page = client.page
        await page.wait_for_selector("#suggestions button")
        begun = {item: await client.text(f"#{item}") for item in told}
        for width in (360, 820, 1280):
            await page.set_viewport_size({"width": width, "height": 900})
            places = await page.evaluate(_PLACES, "button, input, select")
            for n, (left, top, right, bottom) in enumerate(places):
                for x0, y0, x1, y1 in places[n + 1 :]:
                    assert max(x0 - right, left - x1, y0 - bottom, top - y1) >= 7.5
            before = await page.evaluate(_PLACES, moved)
            await page.evaluate(_WRITE, told)
            assert await page.evaluate(_PLACES, moved) == before
            await page.evaluate(_WRITE, begun)


async def test_the_page_says_what_the_user_can_do_now():
    async with (
        listening(app_of(FakeOrchestrator([spoken("Yes.", 3000)]))) as address,
        visit(f"http://{address}/") as client,
    ):
        page = client.page
        assert "Press Talk" in await client.text("#hint") and await page.is_disabled("#stop")
        await page.fill("#text", "Is anyone there?")
        await page.press("#text", "Enter")
        await client.until(client.is_heard, "there is a response")
        assert "Press Stop" in await client.text("#hint")
        await page.click("#stop")
        await page.wait_for_selector("#hint:text('Ask the recorded question, or type one.')")
        assert await page.is_disabled("#stop")


async def test_the_live_api_is_spoken_over_and_can_be_stopped():
    scripts = [spoken("Yes.", 1500), spoken("A long story.", 20_000)]
    async with (
        listening(app_of(FakeOrchestrator(scripts))) as address,
        visit(f"http://{address}/") as client,
    ):
        page = client.page
        await page.select_option("#protocol", "live")
        await page.fill("#text", "Is anyone there?")
        await page.press("#text", "Enter")
        await client.until(client.is_over, "the response is over")
        assert await client.lines("model") == ["modelYes."]
        assert "Is anyone there?" in (await client.lines("you"))[0]
        assert re.fullmatch(r"\d+ ms", await client.text("#ttfp"))
        assert await page.is_disabled("#protocol")
        await page.fill("#text", "Tell me a story.")
        await page.press("#text", "Enter")
        await page.wait_for_selector("#stop:enabled")
        await page.click("#stop")
        await page.wait_for_selector("#stop:disabled")
        assert await client.seconds("heard") < 10
        assert await client.lines("server") == []
        await page.click("#talk")
        assert await client.text("#status") == "not connected"
        assert client.complaints == []


async def test_what_the_model_delegates_to_the_page_is_answered():
    call = done(function_calls=('{"name": "delegate", "arguments": {}}',))
    scripts = [[*spoken("Let me look.", 800)[:-1], call], spoken("It cannot.", 800)]
    orchestrator = FakeOrchestrator(scripts)
    async with listening(app_of(orchestrator)) as address, visit(f"http://{address}/") as client:
        page = client.page
        await page.select_option("#protocol", "live")
        await page.fill("#text", "Look it up.")
        await page.press("#text", "Enter")
        await page.wait_for_selector("#transcript li:has-text('It cannot.')")
        assert "delegated this to the page" in await client.text("#transcript")
        assert "I cannot do that here" in orchestrator.turns[-1].history[-1].parts[0].text


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_page_fits_a_phone(scheme):
    async with (
        listening(app_of(FakeOrchestrator([spoken("Yes.", 800)]))) as address,
        visit(f"http://{address}/", color_scheme=scheme, **PHONE) as client,
    ):
        page = client.page
        await page.fill("#text", "Is anyone there?")
        await page.tap("#text-form button")
        await client.until(client.is_over, "the response is over")
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        for button in await page.locator("button:visible, input:visible").all():
            box = await button.bounding_box()
            assert box["height"] >= _LEAST_TARGET_PX, await button.get_attribute("id")
        assert await _least_contrast(page) >= 4.5  # WCAG 2.2, success criterion 1.4.3
        assert client.complaints == []


async def test_all_controls_are_reachable_by_keyboard_and_have_names():
    async with (
        listening(app_of(FakeOrchestrator())) as address,
        visit(f"http://{address}/") as client,
    ):
        page, reached = client.page, []
        for _ in range(13):
            await page.keyboard.press("Tab")
            reached.append(await page.evaluate("document.activeElement.id"))
        assert [name for name in reached if name][:6] == [
            "talk",
            "clip",
            "voice",
            "protocol",
            "text",
            "transcript",
        ]
        for name in ("Talk", "Mute", "Ask a recorded question", "Stop the answer", "Send"):
            assert await page.get_by_role("button", name=name, exact=True).count() == 1
        assert await page.get_by_label("Or type").count() == 1
        assert await page.get_by_role("log").count() == 1


async def test_the_page_of_a_server_with_keys_asks_for_one():
    async with (
        listening(app_of(FakeOrchestrator([spoken("Yes.", 800)]), api_keys=("right",))) as address,
        visit(f"http://{address}/") as client,
    ):
        page = client.page
        await page.click("#talk")
        for key in ("wrong", "right"):
            await page.wait_for_selector("#key-form:visible")
            await page.fill("#key", key)
            await page.press("#key", "Enter")
        await page.wait_for_selector("#status:text('connected to')")
        await page.fill("#text", "Is anyone there?")
        await page.press("#text", "Enter")
        await client.until(client.is_heard, "there is a response")
        # The browser itself reports refusals of the key; there are no other errors.
        assert all("401" in complaint for complaint in client.complaints)


async def _least_contrast(page) -> float:
    """The lowest contrast ratio of any text to its background, as WCAG 2.2 defines it."""
    return await page.evaluate(
        """() => {
          const light = (colour) => {
            const [r, g, b] = colour.match(/[\\d.]+/g).map((x) => x / 255)
              .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const behind = (node) => {
            for (; node; node = node.parentElement) {
              const colour = getComputedStyle(node).backgroundColor;
              if (!/, 0\\)$/.test(colour)) return colour;
            }
            return "rgb(255, 255, 255)";
          };
          let least = 21;
          const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
          while (walker.nextNode()) {
            const node = walker.currentNode.parentElement;
            const unseen = node.closest(":disabled, .visually-hidden");
            if (unseen || !walker.currentNode.data.trim()) continue;
            const pair = [getComputedStyle(node).color, behind(node)].map(light);
            const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
            least = Math.min(least, ratio);
          }
          return least;
        }"""
    )
