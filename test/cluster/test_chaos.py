"""Processes and machines of a cluster are lost while a user speaks with it, who hears what there is
in an undisturbed session: real Ray, real gateways and transport, stages without engines.
"""

import asyncio
import base64
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, product

import httpx
import numpy as np
import psutil
import pytest
from websockets.exceptions import ConnectionClosedError

from test.cluster.conftest import ENVIRONMENT, RAY_PYTHON, STAGES, START_S, ZONES, Cluster
from test.e2e.socket_client import NO_VAD, Socket, connected
from test.e2e.test_gateway_death import Client, audio_of, held, text_of
from test.unit.client.cutter import Cutter

pytestmark = pytest.mark.e2e

MOMENTS = (
    "idle",
    "user speaks",
    "before the first audio",
    "in audio",
    "interruption",
    "function call",
)
# A process of each stage, at each of the moments; the others are nightly.
KILLS = {
    ("vocoder", "idle"),
    ("talker", "user speaks"),
    ("thinker", "before the first audio"),
    ("talker", "in audio"),
    ("vocoder", "interruption"),
    ("thinker", "function call"),
}
AUDIO, DONE = "response.output_audio.delta", "response.done"
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
HEARD_MS = 400
# What hosts are rolled out with.
NEW = ("--vocoder.max-streams", "99")
Lose = Callable[[], Awaitable[None]]
# Not twice the same: a turn whose content has ended engines twice is refused.
_MOST_TOKENS = count(1000)


@dataclass
class Session:
    """What a user has heard. waited_s: the longest time without audio, from the loss on.

    responses: status, text and sound of each. items: of the conversation, as the client has them.
    """

    socket: Socket
    responses: list[tuple[str, str, bytes]] = field(default_factory=list)
    items: list[tuple] = field(default_factory=list)
    lost_s: float | None = None
    waited_s: float = 0.0

    async def say(self, text: str) -> None:
        content = [{"type": "input_text", "text": text}]
        item = {"type": "message", "role": "user", "content": content}
        await self.socket.send("conversation.item.create", item=item)

    async def lose(self, lose: Lose) -> None:
        self.lost_s = time.monotonic()
        await lose()

    async def hear(
        self, lose: Lose | None = None, *, after: str = "", cancel: bool = False
    ) -> None:
        """A response. after: of which event `lose` is called. cancel: so is the response, then."""
        n_before, latest_s = len(self.socket.events), time.monotonic()
        while True:
            event = await self.socket.until(AUDIO, DONE, after or DONE)
            if event["type"] == AUDIO:
                now_s = time.monotonic()
                if self.lost_s is not None:
                    since_s = max(self.lost_s, latest_s)
                    self.waited_s = max(self.waited_s, now_s - since_s)
                latest_s = now_s
            if event["type"] == DONE:
                break
            if lose is not None and event["type"] == after:
                if cancel:
                    await self.socket.send("response.cancel")
                await self.lose(lose)
                lose = None
        assert lose is None, f"no {after} came"
        events = self.socket.events[n_before:]
        sound = b"".join(base64.b64decode(e["delta"]) for e in events if e["type"] == AUDIO)
        words = "".join(e["delta"] for e in events if e["type"].endswith("transcript.delta"))
        self.responses.append((event["response"]["status"], words, sound))
        self.items += [_said(item) for item in event["response"]["output"]]


def _said(item: dict) -> tuple:
    said = [part.get("transcript") or part.get("text") for part in item.get("content", ())]
    return item["type"], item["status"], said, item.get("name"), item.get("arguments")


async def nothing() -> None:
    """Is lost."""


@asynccontextmanager
async def admitted(url: str) -> AsyncIterator[Socket]:
    """A session, once there is room for it: the machine may be busy with other things."""
    async with AsyncExitStack() as stack:
        while True:
            try:
                socket = await stack.enter_async_context(connected(url))
                break
            except ConnectionClosedError as closed:
                assert closed.rcvd is not None and closed.rcvd.code == 1013
                await asyncio.sleep(1.0)
        yield socket


async def session_of(cluster: Cluster, moment: str, lose: Lose = nothing) -> Session:
    """Three turns; what is lost is lost in the second, or before it."""
    async with admitted(cluster.ws) as socket:
        tools = [TOOL] if moment == "function call" else []
        await socket.session(**NO_VAD, tools=tools, max_output_tokens=next(_MOST_TOKENS))
        session = Session(socket)
        await session.say("hello")
        await socket.send("response.create")
        await session.hear()
        if moment == "idle":
            await session.lose(lose)
        if moment == "user speaks":
            speech = (np.arange(48_000) % 997).astype("<i2")
            await socket.append(speech[:24_000])
            await session.lose(lose)
            await socket.append(speech[24_000:])
            await socket.send("input_audio_buffer.commit")
        else:
            await session.say("look" if moment == "function call" else "tell me more")
        await socket.send("response.create")
        if moment in ("idle", "user speaks"):
            await session.hear()
        elif moment == "in audio":
            await session.hear(lose, after=AUDIO)
        elif moment == "interruption":
            await session.hear(lose, after=AUDIO, cancel=True)
            [item] = socket.events[-1]["response"]["output"]
            truncated = {"item_id": item["id"], "content_index": 0, "audio_end_ms": HEARD_MS}
            await socket.send("conversation.item.truncate", **truncated)
            await socket.until("conversation.item.truncated")
            await socket.send("conversation.item.retrieve", item_id=item["id"])
            got = await socket.until("conversation.item.retrieved")
            session.items[-1] = _said(got["item"])
        else:
            await session.hear(lose, after="response.created")
        await session.say("and then")
        await socket.send("response.create")
        await session.hear()
        return session


@pytest.fixture(scope="module")
def undisturbed(cluster) -> dict[str, Session]:
    async def all_of_them() -> list[Session]:
        return await asyncio.gather(*(session_of(cluster, moment) for moment in MOMENTS))

    found = asyncio.run(all_of_them())
    cluster.until_free()
    return dict(zip(MOMENTS, found, strict=True))


def check_equal(found: Session, undisturbed: Session, moment: str) -> None:
    assert found.items == undisturbed.items
    for n, (one, other) in enumerate(zip(found.responses, undisturbed.responses, strict=True)):
        if moment == "interruption" and n == 1:
            assert one[0] == other[0] == "cancelled"
            shorter = min(len(one[2]), len(other[2]))
            assert shorter and one[2][:shorter] == other[2][:shorter]
        else:
            assert one == other


def killing(cluster: Cluster, stage: str) -> Lose:
    async def kill() -> None:
        os.kill(cluster.pid_of(stage), signal.SIGKILL)

    return kill


async def test_undisturbed_sessions_say_what_their_history_is(undisturbed):
    texts = [[response[1] for response in one.responses] for one in undisturbed.values()]
    firsts, seconds, thirds = zip(*texts, strict=True)
    assert len(set(firsts)) == 1
    # An interrupted text may be complete.
    assert len(set(seconds)) in (3, 4) and len(set(thirds)) == 4
    assert all(len(one.responses[0][2]) == 30 * 1920 * 2 for one in undisturbed.values())
    [call] = [item for item in undisturbed["function call"].items if item[0] == "function_call"]
    assert call[3:] == ("look", '{"at":"it"}')


@pytest.mark.parametrize(
    ("stage", "moment"),
    [
        pytest.param(*case, marks=[pytest.mark.nightly] * (case not in KILLS))
        for case in product(STAGES, MOMENTS)
    ],
)
async def test_a_session_goes_on_when_a_process_is_killed(cluster, undisturbed, stage, moment):
    async def lose() -> None:
        if moment == "function call":
            await asyncio.to_thread(cluster.until, call.exists, 30.0, lambda: "it makes a call")
        await killing(cluster, stage)()

    before, call = cluster.lost_jobs(), cluster.folder / "call"
    call.unlink(missing_ok=True)
    found = await session_of(cluster, moment, lose)
    if (stage, moment) == ("thinker", "function call"):
        # The grammar of a call counts from its begin: the turn fails, and the next one is answered.
        assert [response[0] for response in found.responses] == ["completed", "failed", "completed"]
    else:
        check_equal(found, undisturbed[moment], moment)
    print(f"\n{stage}, {moment}: {found.waited_s:.2f} s without audio")
    await asyncio.to_thread(cluster.until_serving)
    await asyncio.to_thread(cluster.until_free)
    moved = {key: n - before.get(key, 0) for key, n in cluster.lost_jobs().items()}
    allowed = {(stage, "moved"), (stage, "function_call")}
    assert {key for key, n in moved.items() if n} <= allowed


@pytest.mark.parametrize(
    "moment",
    [
        *(pytest.param(m, marks=pytest.mark.nightly) for m in ("idle", "before the first audio")),
        "in audio",
    ],
)
async def test_a_session_goes_on_when_a_machine_is_lost(cluster, undisturbed, moment):
    async def lose() -> None:
        zone.append(cluster.do("zone_of", cluster.pid_of("talker")))
        await asyncio.to_thread(cluster.do, "kill_node", zone[0])

    zone: list[str] = []
    found = await session_of(cluster, moment, lose)
    check_equal(found, undisturbed[moment], moment)
    print(f"\nmachine, {moment}: {found.waited_s:.2f} s without audio")
    began_s = time.monotonic()
    await asyncio.to_thread(cluster.do, "add", zone[0])
    await asyncio.to_thread(cluster.until_serving)
    print(f"its stages serve on another machine {time.monotonic() - began_s:.1f} s after that came")
    await asyncio.to_thread(cluster.until_free)


async def test_a_session_goes_on_when_a_machine_is_cut_off_and_comes_back(cluster, undisturbed):
    async def lose() -> None:
        zone.append(cluster.do("zone_of", cluster.pid_of("talker")))
        await asyncio.to_thread(cluster.do, "pause_node", zone[0])

    zone: list[str] = []
    try:
        found = await session_of(cluster, "in audio", lose)
    finally:
        await asyncio.to_thread(cluster.do, "resume_node", zone[0])
    check_equal(found, undisturbed["in audio"], "in audio")
    print(f"\nsilent machine, in audio: {found.waited_s:.2f} s without audio")
    # Its stages serve again, until it learns from Ray that it is given up.
    again = await session_of(cluster, "in audio")
    check_equal(again, undisturbed["in audio"], "in audio")
    await asyncio.to_thread(cluster.do, "kill_node", zone[0])
    await asyncio.to_thread(cluster.do, "add", zone[0])
    await asyncio.to_thread(cluster.until_serving)
    await asyncio.to_thread(cluster.until_free)


async def test_sessions_go_on_and_begin_without_rays_head(cluster, undisturbed):
    async def lose() -> None:
        await asyncio.to_thread(cluster.do, "kill_head")

    known, before = cluster.rows(), cluster.lost_jobs()
    try:
        found = await session_of(cluster, "in audio", lose)
        assert cluster.lost_jobs() == before, "no job had to move"
        new = await session_of(cluster, "in audio", killing(cluster, "talker"))
    finally:
        await asyncio.to_thread(cluster.do, "start_head")
    for one in (found, new):
        check_equal(one, undisturbed["in audio"], "in audio")
    await asyncio.to_thread(cluster.until_serving)
    assert cluster.rows() == known
    await asyncio.to_thread(cluster.until_free)


async def test_sessions_go_on_and_begin_without_the_store(cluster, undisturbed):
    async def lose() -> None:
        cluster.store.kill()

    def knows_store() -> bool:
        return "sglang_live_gateway_shared_limits_up 1.0" in cluster.metrics()

    before = cluster.lost_jobs()
    await asyncio.to_thread(cluster.until, knows_store, 30.0, lambda: "the store is known")
    try:
        found = await session_of(cluster, "in audio", lose)
        assert not knows_store()
        new = await session_of(cluster, "in audio")
    finally:
        cluster.store.start()
    for one in (found, new):
        check_equal(one, undisturbed["in audio"], "in audio")
    assert cluster.lost_jobs() == before, "no job had to move"
    await asyncio.to_thread(cluster.until, knows_store, 30.0, lambda: "the store is back")


async def test_a_host_is_drained_and_replaced_in_a_session(cluster, undisturbed):
    async def lose() -> None:
        zone = cluster.do("zone_of", cluster.pid_of("talker"))
        [name] = [name for name in cluster.status() if name.startswith(f"voice-{zone}-")]
        assert cluster.do("drain", name)

    before, began_s = cluster.lost_jobs(), time.monotonic()
    found = await session_of(cluster, "in audio", lose)
    check_equal(found, undisturbed["in audio"], "in audio")
    await asyncio.to_thread(cluster.until_serving)
    print(f"\ndrained and replaced after {time.monotonic() - began_s:.1f} s")
    assert cluster.lost_jobs() == before, "no job had to move"
    await asyncio.to_thread(cluster.until_free)


@pytest.mark.nightly
async def test_hosts_are_rolled_out_in_a_session(cluster, undisturbed):
    async def change() -> None:
        cluster.apply(voice_flags=NEW)

    before = set(cluster.status())
    old = {name for name in before if name.startswith("voice-")}
    found = await session_of(cluster, "in audio", change)
    check_equal(found, undisturbed["in audio"], "in audio")

    def is_new() -> bool:
        names = set(cluster.status())
        return len(names) == len(before) and not names & old

    await asyncio.to_thread(cluster.until, is_new, 120.0, cluster.status)
    await asyncio.to_thread(cluster.until_serving)
    again = await session_of(cluster, "in audio")
    check_equal(again, undisturbed["in audio"], "in audio")
    await asyncio.to_thread(cluster.until_free)


async def test_a_manager_that_dies_changes_nothing_and_the_next_one_goes_on(cluster, undisturbed):
    async def lose() -> None:
        cluster.do("kill_manager")

    known, before = cluster.rows(), cluster.lost_jobs()
    found = await session_of(cluster, "in audio", lose)
    check_equal(found, undisturbed["in audio"], "in audio")
    assert cluster.lost_jobs() == before, "no job had to move"
    await asyncio.to_thread(cluster.until_serving)
    assert cluster.rows() == known
    await asyncio.to_thread(cluster.until_free)


async def test_nothing_of_ray_is_in_the_environment_of_a_stage(cluster):
    assert (cluster.folder / "environment").read_text() == "[] "


@pytest.mark.nightly
async def test_two_gateways_serve_the_same_stages(cluster, undisturbed):
    cluster.apply(n_gateways=2, voice_flags=NEW)
    await asyncio.to_thread(cluster.until_serving, 6)
    assert len(set(cluster.gateways)) == 2
    for _ in range(2):
        cluster.gateways = cluster.gateways[::-1]
        found = await session_of(cluster, "in audio")
        check_equal(found, undisturbed["in audio"], "in audio")
    await asyncio.to_thread(cluster.until_free)


async def said_to_a_client(cluster: Cluster, lose: Callable[[], None] | None = None) -> list[tuple]:
    """Text and sound of each response. lose: called in the last but one, in which the client goes
    on at the second gateway."""
    one, two = (gateway.removeprefix("http://") for gateway in cluster.gateways)
    balancer = Cutter(one)

    async def leave() -> None:
        assert lose is not None
        lose()
        balancer.go_to(two)
        balancer.cut()

    async with balancer.listening() as address:
        client = Client(f"ws://{address}/v1/realtime")
        responses = await held(client, None if lose is None else leave)
        await client.close()
    if lose is not None:
        [resumed] = [event for event in client.events if event["type"] == "session.resumed"]
        at = client.events.index(resumed)
        waited_s = client.when(AUDIO, at) - client.came_s[at - 1]
        print(f"\naudio goes on at the other gateway {waited_s:.2f} s after the last event here")
    ended = [event["response"]["id"] for event in client.events if event["type"] == DONE]
    assert ended == [response["id"] for response in responses], "each ends once"
    return [(text_of(one), audio_of(client, one).tobytes()) for one in responses]


async def test_a_call_goes_on_when_its_gateway_is_killed_or_comes_back_too_late(cluster):
    def pid_of(gateway: str) -> int:
        port = int(gateway.rpartition(":")[2])
        return next(
            one.pid
            for one in psutil.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port
        )

    cluster.apply(n_gateways=2, voice_flags=NEW)
    await asyncio.to_thread(cluster.until_serving, 6)
    undisturbed = await said_to_a_client(cluster)
    pid = pid_of(cluster.gateways[0])
    killed = await said_to_a_client(cluster, lambda: os.kill(pid, signal.SIGKILL))
    assert killed == undisturbed
    await asyncio.to_thread(cluster.until_serving, 6)
    await asyncio.to_thread(cluster.until_free)
    pid = pid_of(cluster.gateways[0])
    try:
        stale = await said_to_a_client(cluster, lambda: os.kill(pid, signal.SIGSTOP))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert stale == undisturbed
    await asyncio.to_thread(cluster.until_free)


@pytest.mark.nightly
async def test_a_drained_gateway_leaves_its_call_to_the_other_one(cluster):
    """The client learns of it from its socket alone, and is refused by a balancer that is late."""
    cluster.apply(n_gateways=2, voice_flags=NEW)
    await asyncio.to_thread(cluster.until_serving, 6)
    undisturbed = await said_to_a_client(cluster)
    [draining] = [
        name for name, one in cluster.status().items() if one["url"] == cluster.gateways[0]
    ]
    one, two = (gateway.removeprefix("http://") for gateway in cluster.gateways)
    balancer, began_s = Cutter(one), time.monotonic()

    async def drain() -> None:
        assert await asyncio.to_thread(cluster.do, "drain", draining)
        balancer.go_to(two)

        def drains() -> bool:
            return httpx.get(f"http://{one}/health", timeout=30).status_code == 503

        await asyncio.to_thread(cluster.until, drains, 10.0, lambda: "it drains")

    async with balancer.listening() as address:
        client = Client(f"ws://{address}/v1/realtime")
        responses = await held(client, drain)
        await client.close()
    assert len([event for event in client.events if event["type"] == "session.resumed"]) == 1
    assert [(text_of(one), audio_of(client, one).tobytes()) for one in responses] == undisturbed
    await asyncio.to_thread(cluster.until_serving, 6)
    print(f"\ndrained and replaced after {time.monotonic() - began_s:.1f} s")
    await asyncio.to_thread(cluster.until_free)


async def test_hosts_come_with_the_calls(cluster):
    def is_empty() -> bool:
        url = f"{cluster.gateways[0]}/v1/capacity?scope=fleet"
        fleet = httpx.get(url, timeout=30).json()
        return fleet["gateways"] == 1 and not fleet["sessions"]["open"]

    cluster.apply(voice_flags=NEW)
    await asyncio.to_thread(cluster.until_serving)
    # The last report of a gateway that was lost counts for ten seconds, with all its calls.
    await asyncio.to_thread(cluster.until, is_empty, 30.0, lambda: "no call is open")
    scaling = "[hosts.scaling]\nsessions = 2\nmost = 2\ncold_start_s = 1.0"
    cluster.apply(voice_flags=NEW, voice_scaling=scaling)
    await asyncio.to_thread(cluster.until_serving)
    async with AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(admitted(cluster.ws))

        def have_come() -> bool:
            names = [name for name in cluster.status() if name.startswith("voice-")]
            return len(names) == 2 * len(ZONES)

        await asyncio.to_thread(cluster.until, have_come, 60.0, cluster.status)
    cluster.apply(voice_flags=NEW)
    await asyncio.to_thread(cluster.until_serving)


def test_a_ray_that_would_end_calls_with_its_head_is_refused(cluster):
    before = cluster.status()
    address = cluster.do("facts")["address"]
    command = [RAY_PYTHON, "-m", "sglang_live.launch_cluster", cluster.folder / "cluster.toml"]
    told = subprocess.run(
        [*command, "--address", address],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=START_S,
    )
    assert told.returncode == 2, told.stdout + told.stderr
    last = told.stderr.splitlines()[-1]
    assert "ends 120 s after the head" in last
    assert "RAY_REDIS_ADDRESS" not in last and "niceness" not in last, "they are set"
    assert cluster.status() == before
