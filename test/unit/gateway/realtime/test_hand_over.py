"""A gateway that stops leaves its calls to others, complete: over real sockets, by the journal."""

import asyncio

import pytest
from websockets.exceptions import ConnectionClosed

from sglang_live.client.connection import SessionOptions
from sglang_live.client.conversation import Conversation
from sglang_live.clock import MonotonicClock
from sglang_live.core import AudioDelta, TranscriptDelta
from sglang_live.gateway.call import journaled
from sglang_live.gateway.draining import Drain
from sglang_live.journal.sqlite import SqliteStore
from sglang_live.journal.store import StoreError
from sglang_live.journal.valkey import ValkeyStore
from test.store_server import StoreServer
from test.unit.client.cutter import Cutter
from test.unit.gateway.fakes import done, history_item_of, spoken
from test.unit.gateway.realtime.test_resume_elsewhere import (
    DELTA,
    TEXT,
    Client,
    gateway,
    is_kept,
    refused,
    story,
)
from test.unit.gateway.test_draining import ask, response_until

pytestmark = pytest.mark.usefixtures("must_not_hang")


async def end_of(client: Client) -> tuple[int, str]:
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            await client.next()
    return closed.value.rcvd.code, closed.value.rcvd.reason


def texts(turn) -> list[str]:
    return [item.parts[0].text for item in turn.history]


async def test_a_silent_session_is_another_gateways_at_once(tmp_path):
    drain = Drain()
    async with (
        gateway(tmp_path, [spoken("One.")], drain=drain) as one,
        gateway(tmp_path, [spoken("Two.")]) as two,
        one.socket() as socket,
    ):
        client = await Client(socket).begin(instructions="Be brief.")
        await ask(socket, "hello")
        await client.until("response.done")
        content = [{"type": "input_text", "text": "just now"}]
        item = {"type": "message", "role": "user", "content": content}
        await client.send("conversation.item.create", item=item)
        await client.until("conversation.item.done")
        drain.began.set()
        assert await end_of(client) == (1012, "resume")
        await drain.until_quiet()
        assert not one.orchestrator.turns[1:]
        async with two.socket(resume=client.token, after=client.last_id) as socket2:
            other = Client(socket2)
            resumed = await other.until("session.resumed")
            assert len(other.events) == 1, "nothing is told of twice"
            assert resumed["session"]["instructions"] == "Be brief."
            await other.send("response.create")
            await other.until("response.done")
            [turn] = two.orchestrator.turns
            assert texts(turn) == ["hello", "One.", "just now"]
        async with two.socket(resume=client.token) as late:
            assert refused(await Client(late).next()) == "invalid_resume_token"


async def test_responses_are_made_until_there_is_a_pause_and_none_is_refused(tmp_path):
    drain, gate = Drain(), asyncio.Event()
    scripts = [response_until(gate), spoken("Two.")]
    async with (
        gateway(tmp_path, scripts, drain=drain) as one,
        gateway(tmp_path) as two,
        one.socket() as socket,
    ):
        client = await Client(socket).begin()
        await ask(socket, "hello")
        await client.until(DELTA)
        drain.began.set()
        await asyncio.sleep(0)
        await client.send("response.cancel")
        await ask(socket, "no, this")
        statuses = [(await client.until("response.done"))["response"]["status"] for _ in range(2)]
        assert statuses == ["cancelled", "completed"] and not client.of("error")
        assert await end_of(client) == (1012, "resume")
        async with two.socket(resume=client.token, after=client.last_id) as socket2:
            other = Client(socket2)
            await other.until("session.resumed")
            assert len(other.events) == 1


async def test_a_response_that_does_not_end_in_time_goes_on_elsewhere(tmp_path):
    drain, never = Drain(), asyncio.Event()
    rest = [TranscriptDelta(f"w{n} ", n) for n in (4, 5)]
    whole = [AudioDelta(bytes([n, 0]) * 1920) for n in range(1, 9)]
    scripts = [[*rest, *whole, done(item=history_item_of("w1 w2 w3 w4 w5"))]]
    async with (
        gateway(tmp_path, [story(3, 5, never)], drain=drain) as one,
        gateway(tmp_path, scripts) as two,
        one.socket() as socket,
    ):
        client = await Client(socket).begin()
        await ask(socket, "tell me")
        created = await client.until("response.created")
        while sum(map(len, client.audio.values())) < 5 * 3840:
            await client.next()
        drain.began.set()
        drain.over.set()
        assert await end_of(client) == (1012, "resume")
        [item_id] = client.audio
        at = {"after": client.last_id, "heard_ms": "240"}
        async with two.socket(resume=client.token, **at) as socket2:
            other = Client(socket2)
            ended = (await other.until("response.done"))["response"]
            assert (ended["id"], ended["status"]) == (created["response"]["id"], "completed")
            assert "".join(e["delta"] for e in other.of(TEXT)) == "w4 w5 "
            made = b"".join(step.pcm for step in whole)
            assert other.audio == {item_id: made[240 * 48 :]}
            [turn] = two.orchestrator.turns
            assert turn.begun.said == "w1 w2 w3 "


async def test_a_client_that_is_away_finds_its_session_elsewhere(tmp_path):
    drain = Drain()
    async with (
        gateway(tmp_path, drain=drain) as one,
        gateway(tmp_path) as two,
        one.socket() as socket,
    ):
        client = await Client(socket).begin()
        socket.transport.abort()
        await asyncio.sleep(0.1)
        drain.began.set()
        await drain.until_quiet()
        assert one.orchestrator.session.closed.is_set()
        async with two.socket(resume=client.token, after=client.last_id) as socket2:
            await Client(socket2).until("session.resumed")


async def test_without_the_store_a_session_ends_with_its_gateway(tmp_path, monkeypatch):
    drain = Drain()
    monkeypatch.setattr(journaled, "_HANDED_OVER_S", 0.2)

    async def away(self, writes, keep_s):
        raise StoreError("away")

    async with gateway(tmp_path, drain=drain) as one, one.socket() as socket:
        client = await Client(socket).begin()
        await is_kept(one, client.token, lambda kept: "head" in kept.records)
        with monkeypatch.context() as patched:
            patched.setattr(SqliteStore, "write", away)
            drain.began.set()
            assert await end_of(client) == (1012, "server_draining")


async def test_no_turn_waits_while_the_network_to_the_store_is_cut(tmp_path):
    """Nothing passes, and neither end is told; later the journal has all of the call."""
    server, drain = StoreServer(tmp_path), Drain()
    server.start()
    network = Cutter(f"127.0.0.1:{server.port}")
    try:
        async with (
            network.listening() as at,
            gateway(
                tmp_path,
                [spoken("One."), spoken("Two.")],
                store=ValkeyStore(f"valkey://{at}"),
                drain=drain,
            ) as one,
            gateway(tmp_path, [spoken("Three.")], store=ValkeyStore(server.url)) as two,
            one.socket() as socket,
        ):
            client = await Client(socket).begin()
            await ask(socket, "hello")
            await client.until("response.done")
            await is_kept(
                two, client.token, lambda kept: b"hello" in b"".join(kept.records.values())
            )
            network.flows.clear()
            await ask(socket, "and in the cut?")
            assert (await client.until("response.done"))["response"]["status"] == "completed"
            async with asyncio.timeout(20):
                while not one.journal.counts.failures:
                    await asyncio.sleep(0.05)
            assert one.journal.pending_bytes
            network.flows.set()
            await is_kept(
                two, client.token, lambda kept: b"Two." in b"".join(kept.records.values())
            )
            drain.began.set()
            assert await end_of(client) == (1012, "resume")
            async with two.socket(resume=client.token, after=client.last_id) as socket2:
                other = Client(socket2)
                await other.until("session.resumed")
                await ask(socket2, "third")
                await other.until("response.done")
                [turn] = two.orchestrator.turns
                assert texts(turn) == ["hello", "One.", "and in the cut?", "Two.", "third"]
    finally:
        server.kill()


async def test_a_session_that_is_not_resumable_ends_with_its_gateway(tmp_path):
    drain = Drain()
    async with gateway(tmp_path, drain=drain) as one, one.socket() as socket:
        client = Client(socket)
        await client.until("session.created")
        drain.began.set()
        assert await end_of(client) == (1012, "server_draining")


async def test_the_packages_client_goes_on_while_gateways_are_rolled(tmp_path):
    """A balancer learns of a drain late; handshakes are refused until then."""
    drains = [Drain() for _ in range(3)]
    scripts = [[spoken(f"Turn {n}.", 800) for n in range(n_turns)] for n_turns in (2, 2, 4)]
    events: list[dict] = []
    async with (
        gateway(tmp_path, scripts[0], drain=drains[0]) as one,
        gateway(tmp_path, scripts[1], drain=drains[1]) as two,
        gateway(tmp_path, scripts[2], drain=drains[2]) as three,
    ):
        addresses = [g.url.removeprefix("ws://").partition("/")[0] for g in (one, two, three)]
        balancer = Cutter(addresses[0])

        async def roll() -> None:
            for drain, successor in zip(drains, addresses[1:], strict=False):
                await asyncio.sleep(1.2)
                drain.began.set()
                await asyncio.sleep(0.3)
                balancer.go_to(successor)
                await drain.until_quiet()

        async with balancer.listening() as at:
            options = SessionOptions(url=f"ws://{at}/v1/realtime", turn_timeout_s=20.0)
            async with Conversation(options, MonotonicClock(), events.append) as conversation:
                rolling = asyncio.create_task(roll())
                turns = []
                for n in range(4):
                    turns.append(await conversation.ask(f"Question {n}?"))
                    await conversation.wait_until_played()
                await rolling
                turns.append(await conversation.ask("Still there?"))
    assert all(turn.ok for turn in turns), [turn.error for turn in turns]
    assert len([e for e in events if e["type"] == "session.resumed"]) == 2
    asked = [text for text in texts(three.orchestrator.turns[-1]) if text.endswith("?")]
    assert asked == [*(f"Question {n}?" for n in range(4)), "Still there?"]
