"""A server of a model that hears while it speaks, through its public API."""

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise

import httpx
import numpy as np
import pytest
from websockets.asyncio.client import connect

from test.e2e.conftest import Server, running_server, wait_until
from test.e2e.socket_client import connected
from test.e2e.test_live import play, sounding, text_of
from test.moshi import checkpoint as tiny

pytestmark = [pytest.mark.e2e]

RESTART_S = 90


@pytest.fixture(scope="module")
def moshi(tmp_path_factory) -> Iterator[Server]:
    path = tiny.build(tmp_path_factory.mktemp("moshi"))
    with running_server(str(path), tmp_path_factory.mktemp("logs")) as running:
        yield running


def sound(seconds: float) -> np.ndarray:
    rng = np.random.default_rng(2)
    return (3000 * rng.standard_normal(round(24_000 * seconds))).astype("<i2")


async def frames(socket, n: int) -> list[dict]:
    """Reports of the model's frames. A frame of the user that comes too late has one as well."""
    found: list[dict] = []
    while len(found) < n:
        report = await socket.until("frame.done")
        if report["outcome"] != "dropped":
            found.append(report)
    return found


async def test_it_speaks_while_it_is_spoken_to(moshi):
    async with connected(moshi.ws) as socket:
        told = socket.events[0]["session"]["audio"]["input"]["turn_detection"]
        assert (told["type"], told["frame_ms"]) == ("frames", 80)
        speaking = asyncio.create_task(socket.speak(sound(4.0)))
        reports = await frames(socket, 45)
        await speaking
    assert {report["outcome"] for report in reports} <= {"on_time", "late"}
    assert [report["frame_index"] for report in reports] == list(range(45))
    # The audio of a frame comes before its report; a step's sound is one frame.
    assert 45 * 1920 <= len(socket.audio()) <= 46 * 1920
    kinds = [event["type"] for event in socket.events]
    assert kinds.count("response.created") == 1
    said = "".join(
        event["delta"]
        for event in socket.events
        if event["type"] == "response.output_audio_transcript.delta"
    )
    assert said.strip() and said == "".join(report["text"] for report in reports)[: len(said)]
    wait_until(lambda: moshi.stage_load("talker", "replies") == 0, 15, "no call")
    for stage, what in (("talker", "kv_tokens_used"), ("vocoder", "jobs"), ("talker", "jobs")):
        wait_until(lambda s=stage, w=what: moshi.stage_load(s, w) == 0, 15, f"{stage} {what}")


async def test_a_user_who_stops_to_send_is_silent(moshi):
    async with connected(moshi.ws) as socket:
        await socket.speak(sound(0.5))
        reports = await frames(socket, 30)
    assert sum(report["missing_before"] for report in reports) >= 15
    # What silence led to has no time at which the user's frame came.
    assert [r["latency_ms"] for r in reports[-5:]] == [None] * 5


async def test_in_live_it_speaks_from_the_start_whatever_the_user_does(moshi, tmp_path):
    told = await play("duplex", moshi.http, tmp_path)
    ticks = sounding(told)
    # Before the user speaks, meanwhile, and while the user is muted; frames of a busy machine are
    # late, so that there is silence too.
    spans = [range(15), range(15, 40), range(40, 60)]
    assert all(set(span) & {*ticks} for span in spans), ticks
    said = [e for e in told["events"] if e["type"] == "session.output_transcript.delta"]
    assert said and not text_of(told, "input")
    assert all(one["end_ms"] <= later["start_ms"] for one, later in pairwise(said))
    assert 100 * ticks[0] <= said[0]["start_ms"]
    assert told["events"][-1]["reason"] == "close_requested"
    wait_until(lambda: moshi.stage_load("talker", "replies") == 0, 15, "no call")


async def test_what_live_cannot_do_with_it_is_refused_by_name(moshi):
    async def refused(**session) -> str:
        async with connect(f"{moshi.ws.partition('/v1/')[0]}/v1/live/sessions") as socket:
            start = {"type": "session.start", "session": {"model": "demo", **session}}
            await socket.send(json.dumps(start))
            return json.loads(await socket.recv())["error"]["message"]

    assert "hears and speaks at the same time" in await refused(delegation={"type": "client"})
    assert "takes no instructions" in await refused(instructions="Be a pirate.")
    wait_until(lambda: moshi.stage_load("talker", "replies") == 0, 15, "no call")


async def test_what_such_a_model_does_not_do_is_refused_by_name(moshi):
    async with connected(moshi.ws) as socket:

        async def refused(**session) -> str:
            return (await socket.session(**session))["error"]["message"]

        detection = {"type": "server_vad"}
        assert "in frames of 80 ms" in await refused(audio={"input": {"turn_detection": detection}})
        assert "in frames of 80 ms" in await refused(audio={"input": {"turn_detection": None}})
        assert "its output is audio" in await refused(output_modalities=["text"])
        tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
        assert "it calls no functions" in await refused(tools=[tool])
        assert "without an end" in await refused(max_output_tokens=10)
        form = {"type": "audio/pcm", "rate": 16_000}
        assert "24000" in await refused(audio={"input": {"format": form}})
        await socket.session(instructions="Be a pirate.")
        await socket.speak(sound(0.2))
        done = await socket.until("response.done")
        assert done["response"]["status"] == "failed"
        assert "takes no instructions" in str(done["response"]["status_details"])
        assert "cannot change" in await refused(instructions="")
        await socket.send("response.create")
        assert (await socket.until("error"))["error"]["code"] == "frame_mode"
    for path in ("/v1/audio/speech", "/v1/chat/completions"):
        response = httpx.post(f"{moshi.http}{path}", json={"input": "hello"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "calls_only")


async def test_a_call_goes_on_after_the_talkers_end(moshi):
    async with connected(moshi.ws) as socket:
        speaking = asyncio.create_task(socket.speak(sound(60.0)))
        await frames(socket, 20)
        moshi.stage_process("talker").kill()
        dropped = await socket.until("frame.done")
        while dropped["outcome"] != "dropped":
            dropped = await socket.until("frame.done")
        async with asyncio.timeout(RESTART_S):
            while (await socket.until("frame.done"))["outcome"] == "dropped":
                pass
        assert {report["outcome"] for report in await frames(socket, 20)} <= {"on_time", "late"}
        speaking.cancel()
    created = [event for event in socket.events if event["type"] == "response.created"]
    assert len(created) == 1
