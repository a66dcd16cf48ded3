"""kill -9 of one of two gateways in front of the same stages, in the middle of a response.

The client is the package's own, behind a balancer. It must hear every sample once, the stages must
have kept its KV, and nothing may be left when the call is over.
"""

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from sglang_live.client.connection import SessionOptions
from sglang_live.client.playback_clock import PlaybackClock
from sglang_live.client.resuming import ResumingSocket
from sglang_live.clock import MonotonicClock
from sglang_live.policy.policies import POLICIES
from sglang_live.stages.ports import free_port
from test.e2e.conftest import Server, running_server, wait_until
from test.e2e.socket_client import is_whole
from test.unit.client.cutter import Cutter

pytestmark = [pytest.mark.e2e]

START_S = 600
STAGES = ("thinker", "talker", "vocoder")
NAMES = [name for name in POLICIES if name not in ("admission", "arbiter")]
RATE_HZ = 24_000
AUDIO, TEXT = "response.output_audio.delta", "response.output_audio_transcript.delta"
QUESTIONS = ("Remember this: the harbour is behind the hill.", "Say it once more.")
LAST = "Now tell me a long story about it."
SETTINGS = {
    "type": "realtime",
    "resumable": True,
    "temperature": 0,
    "max_output_tokens": 60,
    "audio": {"input": {"turn_detection": None}},
}
# Tokens of a question and of a page of KV.
N_NEW = 150


@contextmanager
def running_stage(stage: str, folder: Path) -> Iterator[str]:
    """Yields its address."""
    address = f"tcp://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "sglang_live.launch_stage", "--stage", stage]
    command += ["--model-path", "demo-random", "--bind", address]
    command += ["--live-policies", ",".join(NAMES)]
    with (folder / f"{stage}.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        yield address
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@dataclass
class Fleet:
    """Two gateways of the same stages. balancer: through which clients come."""

    one: Server
    two: Server
    balancer: Cutter


@pytest.fixture(scope="module")
def fleet(tmp_path_factory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    key = folder / "key"
    key.write_bytes(os.urandom(32).hex().encode())
    key.chmod(0o600)
    flags = ["--journal", f"sqlite:{folder}/journal", "--journal-key-file", str(key)]
    with ExitStack() as running:
        for stage in STAGES:
            address = running.enter_context(running_stage(stage, folder))
            flags += [f"--{stage}.connect", address]
        gateways = []
        for name in ("one", "two"):
            (folder / name).mkdir()
            start = running_server("demo-random", folder / name, *flags, start_timeout_s=START_S)
            gateways.append(running.enter_context(start))
        one, two = gateways
        yield Fleet(one, two, Cutter(f"127.0.0.1:{one.port}"))


@dataclass
class Client:
    """
    audio: by item. came_s: of each event, with its type.
    """

    url: str
    events: list[dict[str, Any]] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)
    audio: dict[str, bytearray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.playback = PlaybackClock(MonotonicClock())
        self._socket = ResumingSocket(SessionOptions(url=self.url), lambda: self.playback.heard_s)
        self.open, self.close = self._socket.open, self._socket.close

    async def send(self, kind: str, **fields: Any) -> None:
        await self._socket.send({"type": kind, **fields})

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(90):
            event = json.loads(await self._socket.recv())
        self.events.append(event)
        self.came_s.append(time.monotonic())
        assert event["type"] != "error", event
        if event["type"] == AUDIO:
            if event["item_id"] not in self.audio:
                self.playback = PlaybackClock(MonotonicClock())
                self.audio[event["item_id"]] = bytearray()
            pcm = base64.b64decode(event["delta"])
            self.audio[event["item_id"]] += pcm
            self.playback.packet_received(len(pcm) / 2 / RATE_HZ)
        return event

    async def until(self, kind: str) -> dict[str, Any]:
        while (event := await self.next())["type"] != kind:
            pass
        return event

    async def say(self, text: str) -> None:
        content = [{"type": "input_text", "text": text}]
        item = {"type": "message", "role": "user", "content": content}
        await self.send("conversation.item.create", item=item)
        await self.send("response.create")

    async def ask(self, text: str) -> dict[str, Any]:
        await self.say(text)
        response = (await self.until("response.done"))["response"]
        await self.playback.wait_until_played()
        return response

    async def begin(self) -> None:
        await self.open()
        await self.send("session.update", session=SETTINGS)
        await self.until("session.updated")

    def said(self, item_id: str) -> str:
        return "".join(
            e["delta"] for e in self.events if e["type"] == TEXT and e["item_id"] == item_id
        )

    def when(self, kind: str, since: int = 0) -> float:
        """When the first event of this type came, of those from a number on."""
        found = (n for n, e in enumerate(self.events) if n >= since and e["type"] == kind)
        return self.came_s[next(found)]


def n_cached(response: dict[str, Any]) -> tuple[int, int]:
    """Tokens of the prompt, and those of them whose KV was there."""
    usage = response["usage"]
    return usage["input_tokens"], usage["input_token_details"]["cached_tokens"]


async def held(client: Client, in_the_middle=None) -> list[dict[str, Any]]:
    """Hold the conversation. in_the_middle: called in its last response."""
    await client.begin()
    responses = [await client.ask(question) for question in QUESTIONS]
    await client.say(LAST)
    if in_the_middle is not None:
        n_known = sum(map(len, client.audio.values()))
        while sum(map(len, client.audio.values())) < n_known + 2 * RATE_HZ:
            await client.next()
        await asyncio.sleep(0.6)  # some of it was heard
        await in_the_middle()
    responses.append((await client.until("response.done"))["response"])
    await client.playback.wait_until_played()
    responses.append(await client.ask("And then?"))
    return responses


def audio_of(client: Client, response: dict[str, Any]) -> np.ndarray:
    [item] = response["output"]
    return np.frombuffer(bytes(client.audio[item["id"]]), "<i2").astype(int)


def text_of(response: dict[str, Any]) -> str:
    [item] = response["output"]
    return item["content"][0]["transcript"]


async def test_a_call_goes_on_when_its_gateway_is_killed(fleet):
    undisturbed = Client(fleet.two.ws)
    killed_s = n_before = 0.0

    async def kill() -> None:
        nonlocal killed_s, n_before
        n_before = len(client.events)
        killed_s = time.monotonic()
        fleet.one.process.kill()
        fleet.balancer.go_to(f"127.0.0.1:{fleet.two.port}")
        fleet.balancer.cut()

    async with fleet.balancer.listening() as address:
        client = Client(f"ws://{address}/v1/realtime")
        whole, told = await asyncio.gather(held(undisturbed), held(client, kill))
        resumed_s = client.when("session.resumed", n_before) - killed_s
        [resumed] = [e for e in client.events if e["type"] == "session.resumed"]
        audio_s = client.when(AUDIO, client.events.index(resumed)) - killed_s
        assert len({e["event_id"] for e in client.events}) == len(client.events)
        await asyncio.gather(undisturbed.close(), client.close())
    assert all(is_whole({"response": one}) for one in (*whole, *told))
    created = [e["response"]["id"] for e in client.events if e["type"] == "response.created"]
    ended = [e["response"]["id"] for e in client.events if e["type"] == "response.done"]
    assert created == ended and len(ended) == 4, "none is lost, and none comes twice"
    items = [e["item"]["id"] for e in client.events if e["type"] == "conversation.item.added"]
    assert len(items) == len({*items}) == 8
    assert resumed["items"] == items[: len(resumed["items"])] and len(resumed["items"]) == 6
    for one, other in zip(whole, told, strict=True):
        assert text_of(one) == text_of(other)
        heard, made = audio_of(client, other), audio_of(undisturbed, one)
        assert len(heard) == len(made)
        assert abs(heard - made).max() <= 1  # chunks of other sizes round otherwise
        assert client.said(other["output"][0]["id"]).startswith(text_of(other)[:20])
    n_prompt, n_warm = n_cached(told[3])
    assert n_warm >= n_prompt - N_NEW and n_warm == n_cached(whole[3])[1]
    print(
        f"\nkilled: session resumed after {resumed_s:.2f} s, audio after {audio_s:.2f} s; "
        f"{n_warm} of {n_prompt} tokens of the next turn were cached"
    )
    series = 'sglang_live_stage_load{replica="0",stage="thinker",what="sessions_taken_over"} 1.0'
    wait_until(lambda: series in httpx.get(f"{fleet.two.http}/metrics").text, 15, "it was taken")
    fleet.two.wait_until_free()
