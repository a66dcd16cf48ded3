"""The suite finds what is wrong, and nothing where nothing is."""

import asyncio
import json
from xml.etree import ElementTree

import pytest
from websockets.asyncio.server import serve

from sglang_live.conformance.__main__ import PROFILES, run, run_all
from sglang_live.conformance.report import Result, as_junit, as_text, summary
from sglang_live.conformance.server import Server, Skip, Violation
from test.unit.gateway.fakes import FakeOrchestrator, app_of
from test.unit.gateway.live_server import listening

SESSION = {"type": "realtime", "object": "realtime.session", "id": "sess_1", "model": "m"}
CREATED = {"type": "session.created", "event_id": "event_1", "session": SESSION}


async def test_nothing_is_wrong_with_the_gateway():
    async with listening(app_of(FakeOrchestrator(n_more=5), api_keys=("k",))) as address:
        server = Server(f"http://{address}", "k", None, None)
        await server.look()
        assert server.is_ours and server.model == "fake-omni"
        scripted = {"core/output_limit": "the scripted model has none"}
        results = await run_all(server, ["core"], scripted)
    assert [as_text(result) for result in results if result.outcome == "failed"] == []
    assert sum(result.outcome == "passed" for result in results) > 10


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        (["{"], "not JSON"),
        ([b"\x00"], "binary"),
        (["[]"], "without a type"),
        ([json.dumps({**CREATED, "session": None})], "session"),
        ([json.dumps({"type": "response.created", "event_id": "x", "response": {}})], "first"),
        ([json.dumps({**CREATED, "session": {**SESSION, "type": "transcription"}})], "type is"),
        ([], "closes the connection"),
    ],
)
async def test_what_breaks_the_protocol_is_found(frames, why):
    async def break_it(socket) -> None:
        for frame in frames:
            await socket.send(frame)

    async with serve(break_it, "127.0.0.1", 0) as broken:
        port = broken.sockets[0].getsockname()[1]
        server = Server(f"http://127.0.0.1:{port}", None, "m", None)
        result = await run(server, "core", PROFILES["core"][0], {})
    assert result.outcome == "failed" and why in result.why, result


async def test_what_is_expected_to_fail_may_and_what_is_repaired_must_be_told():
    async def fails(server) -> None:
        raise Violation("no")

    async def passes(server) -> None:
        """It does."""

    async def skips(server) -> None:
        raise Skip("not here")

    async def crashes(server) -> None:
        raise KeyError("x")

    expected = {"p/fails": "we know", "p/passes": "we thought", "p/skips": "we know"}
    server = Server("http://x", None, "m", None)
    found = [await run(server, "p", check, expected) for check in (fails, passes, skips, crashes)]
    assert [result.outcome for result in found] == ["expected", "repaired", "skipped", "failed"]
    assert "we know" in found[0].why and found[1].what == "It does."


def test_the_report_is_junit():
    results = [
        Result("core", "one", "One.", "passed", "", 0.5),
        Result("core", "two", "Two.", "failed", "it <is> not", 1.0),
        Result("live", "three", "Three.", "expected", "we know", 0.0),
    ]
    core, live = ElementTree.fromstring(as_junit(results))
    assert core.attrib["tests"] == "2" and core.attrib["failures"] == "1"
    assert core[1].find("failure").attrib["message"] == "it <is> not"
    assert live[0].find("skipped") is not None and live.attrib["failures"] == "0"
    assert summary(results) == "core: 1 passed, 1 failed\nlive: 1 expected"


def test_every_check_says_what_it_claims():
    names = [(profile, check.__name__) for profile, all_ in PROFILES.items() for check in all_]
    assert len(set(names)) == len(names)
    assert all(check.__doc__ for all_ in PROFILES.values() for check in all_)
    assert asyncio.iscoroutinefunction(PROFILES["live"][0])
