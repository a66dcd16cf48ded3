"""A call that goes on at another gateway, which has nothing of it but the journal."""

import asyncio
import base64
import json
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlencode

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from sglang_live.clock import MonotonicClock
from sglang_live.core import AudioDelta, AudioPart, TextPart, TranscriptDelta
from sglang_live.errors import StageFailedError
from sglang_live.journal.journal import Journal
from sglang_live.journal.records import FleetKey
from sglang_live.journal.sqlite import SqliteStore
from sglang_live.journal.store import Store
from test.unit.gateway.fakes import (
    FakeOrchestrator,
    app_of,
    done,
    history_item_of,
    spoken,
    tone,
    voice,
)
from test.unit.gateway.live_server import listening
from test.unit.gateway.realtime.test_tool_calls import CALL, WEATHER
from test.unit.gateway.test_draining import ask, until

pytestmark = pytest.mark.usefixtures("must_not_hang")

DELTA, TEXT = "response.output_audio.delta", "response.output_audio_transcript.delta"
KEY = FleetKey(b"of all gateways of this fleet, at least 32 bytes")


@dataclass
class Gateway:
    """url: without a query."""

    url: str
    orchestrator: FakeOrchestrator
    journal: Journal

    def socket(self, key: str | None = None, **query):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return connect(
            f"{self.url}?{urlencode(query)}", additional_headers=headers, compression=None
        )


@asynccontextmanager
async def gateway(
    folder,
    scripts: list | None = None,
    key: FleetKey = KEY,
    of=FakeOrchestrator,
    store: Store | None = None,
    **config,
):
    """store: None: a file in the folder, as of all others with this folder."""
    orchestrator = of(scripts or [])
    store = store or SqliteStore(folder / "journal")
    journal = Journal(store, key, MonotonicClock(), keep_s=60.0)
    await journal.start()
    try:
        # A machine that is busy with other tests refuses no session.
        app = app_of(orchestrator, journal=journal, **{"max_loop_lag_s": None} | config)
        async with listening(app) as address:
            yield Gateway(f"ws://{address}/v1/realtime", orchestrator, journal)
    finally:
        await journal.close()


@dataclass
class Client:
    """
    events: that have come. audio: of each item.
    """

    socket: object
    events: list[dict] = field(default_factory=list)
    audio: dict[str, bytes] = field(default_factory=dict)
    token: str = ""

    async def send(self, kind: str, **fields) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def next(self) -> dict:
        event = json.loads(await self.socket.recv())
        self.events.append(event)
        if "session" in event:
            self.token = (event["session"].get("resumable") or {}).get("token", "")
        if event["type"] == DELTA:
            heard = self.audio.get(event["item_id"], b"")
            self.audio[event["item_id"]] = heard + base64.b64decode(event["delta"])
        return event

    async def until(self, kind: str) -> dict:
        while (event := await self.next())["type"] != kind:
            pass
        return event

    async def begin(self, **session) -> "Client":
        await self.until("session.created")
        update = {"type": "realtime", "resumable": True, **session}
        await self.send("session.update", session=update)
        await self.until("session.updated")
        return self

    def of(self, kind: str) -> list[dict]:
        return [event for event in self.events if event["type"] == kind]

    @property
    def last_id(self) -> str:
        return self.events[-1]["event_id"]


async def is_kept(gateway: Gateway, known: str | Callable[[], str], holds) -> None:
    """Wait until the journal has it. known: the token, or returns the newest one."""
    async with asyncio.timeout(20):
        while True:
            token = known if isinstance(known, str) else known()
            session_id = token.removeprefix("rt_").partition(".")[0]
            kept = await gateway.journal.find(session_id, token)
            if kept is not None and holds(kept):
                return
            await asyncio.sleep(0.01)


def refused(event: dict) -> str:
    assert event["type"] == "error", event
    return event["error"]["code"]


async def test_another_gateway_has_settings_items_and_numbers_of_turns(tmp_path):
    first_scripts = [spoken("One."), spoken("Two.")]
    async with (
        gateway(tmp_path, first_scripts) as one,
        gateway(tmp_path) as two,
        one.socket() as socket,
    ):
        client = await Client(socket).begin(instructions="Be brief.", temperature=0.5)
        for text in ("hello", "and then?"):
            await ask(socket, text)
            await client.until("response.done")
        before = one.orchestrator.session
        assert before.epoch == 1
        await is_kept(two, client.token, lambda kept: len(kept.records) >= 7)
        async with two.socket(resume=client.token, after=client.last_id) as socket2:
            other = Client(socket2)
            resumed = await other.until("session.resumed")
            assert len(other.events) == 1
            assert resumed["session"]["instructions"] == "Be brief."
            assert resumed["session"]["id"] == before.session_id
            assert resumed["events_received"] == 5
            added = [e["item"]["id"] for e in client.of("conversation.item.added")]
            assert resumed["items"] == added
            after = two.orchestrator.session
            assert (after.epoch, after.at) == (2, before.addresses)
            assert after.n_before == 2
            await ask(socket2, "third")
            await other.until("response.done")
            keys = [item.key for item in before.turns[-1].history]
            [turn] = after.turns
            assert [item.key for item in turn.history][: len(keys)] == keys
            assert [item.key for item in after.restored][: len(keys)] == keys
            said = [item.parts[0].text for item in turn.history]
            assert said == ["hello", "One.", "and then?", "Two.", "third"]
            assert turn.history[1].token_ids == (1, 2, 3)
            assert (turn.temperature, turn.cache_salt) == (0.5, before.turns[0].cache_salt)
            with pytest.raises(ConnectionClosed) as closed:
                await client.until("never")
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1000, "resumed")
            await before.closed.wait()
        await after.closed.wait()


async def test_a_used_stolen_or_foreign_token_is_refused_and_changes_nothing(tmp_path):
    keys = {"api_keys": ("mine", "theirs")}
    other_fleet = FleetKey(b"of the gateways of another fleet, of which 32 bytes")
    async with (
        gateway(tmp_path, **keys) as one,
        gateway(tmp_path, **keys) as two,
        gateway(tmp_path, key=other_fleet, **keys) as foreign,
        one.socket("mine") as socket,
    ):
        client = await Client(socket).begin()
        token = client.token
        await is_kept(two, token, lambda kept: "head" in kept.records)
        for at, key, bad in (
            (two, "theirs", token),
            (two, "mine", token + "x"),
            (two, "mine", token[:-1]),
            (foreign, "mine", token),
            (two, "mine", f"rt_{'x' * 500}.y"),
        ):
            async with at.socket(key, resume=bad) as thief:
                assert refused(await Client(thief).next()) == "invalid_resume_token"
        async with two.socket("mine", resume=token, after="event_other_3") as late:
            assert refused(await Client(late).next()) == "resume_too_late"
        await ask(socket)  # the call is as before
        await client.until("response.done")
        async with two.socket("mine", resume=token) as socket2:
            await Client(socket2).until("session.resumed")
            for at in (one, two):
                async with at.socket("mine", resume=token) as thief:
                    assert refused(await Client(thief).next()) == "invalid_resume_token"


async def test_one_of_two_gateways_gets_a_token_that_comes_to_both(tmp_path):
    async with (
        gateway(tmp_path) as one,
        gateway(tmp_path) as two,
        gateway(tmp_path) as three,
        one.socket() as socket,
    ):
        client = await Client(socket).begin()
        await is_kept(two, client.token, lambda kept: "head" in kept.records)
        async with (
            two.socket(resume=client.token) as a,
            three.socket(resume=client.token) as b,
        ):
            came = await asyncio.gather(Client(a).next(), Client(b).next())
        kinds = sorted(event["type"] for event in came)
        assert kinds == ["error", "session.resumed"]


async def test_a_session_that_is_over_or_not_resumable_any_more_is_nowhere(tmp_path):
    async with gateway(tmp_path) as one, gateway(tmp_path) as two:
        tokens = []
        async with one.socket() as socket:
            client = await Client(socket).begin()
            tokens.append(client.token)
            await is_kept(two, client.token, lambda kept: "head" in kept.records)
            update = {"type": "realtime", "resumable": False}
            await client.send("session.update", session=update)
            await client.until("session.updated")
            await client.send("session.update", session={**update, "resumable": True})
            await client.until("session.updated")
            tokens.append(client.token)
        await one.orchestrator.session.closed.wait()
        async with asyncio.timeout(20):
            while await two.journal.find(one.orchestrator.session.session_id, tokens[1]):
                await asyncio.sleep(0.01)
        for token in tokens:
            async with two.socket(resume=token) as late:
                assert refused(await Client(late).next()) == "invalid_resume_token"


def story(n_words: int, n_frames: int, gate: asyncio.Event | None = None) -> list:
    """Words from 1, one token each, then frames of 80 ms whose loudness is their number."""
    words = [TranscriptDelta(f"w{n} ", n) for n in range(1, n_words + 1)]
    frames = [AudioDelta(bytes([n, 0]) * 1920) for n in range(1, n_frames + 1)]
    return [*words, *frames, *([gate] if gate else [done("".join(w.text for w in words))])]


async def test_a_running_response_goes_on_where_the_client_is(tmp_path):
    gate = asyncio.Event()
    rest = [TranscriptDelta(f"w{n} ", n) for n in (4, 5)]
    whole = [AudioDelta(bytes([n, 0]) * 1920) for n in range(1, 9)]
    scripts = [[*rest, *whole, done(item=history_item_of("w1 w2 w3 w4 w5"))]]
    async with (
        gateway(tmp_path, [story(3, 5, gate)]) as one,
        gateway(tmp_path, scripts) as two,
        one.socket() as socket,
    ):
        client = await Client(socket).begin()
        await ask(socket, "tell me")
        created = await client.until("response.created")
        while sum(map(len, client.audio.values())) < 5 * 3840:
            await client.next()
        [item_id] = client.audio
        # What is written within half a second of the response.
        await is_kept(two, client.token, lambda kept: b"w3" in kept.records.get("latest", b""))
        socket.transport.abort()
        at = {"after": client.last_id, "heard_ms": "240"}
        async with two.socket(resume=client.token, **at) as socket2:
            other = Client(socket2)
            ended = (await other.until("response.done"))["response"]
            assert ended["id"] == created["response"]["id"]
            assert (ended["status"], ended["output"][0]["id"]) == ("completed", item_id)
            assert not other.of("response.created") and not other.of("response.output_item.added")
            assert "".join(e["delta"] for e in other.of(TEXT)) == "w4 w5 "
            assert ended["output"][0]["content"][0]["transcript"] == "w1 w2 w3 w4 w5 "
            made = b"".join(step.pcm for step in whole)
            assert other.audio == {item_id: made[240 * 48 :]}
            [turn] = two.orchestrator.turns
            assert (turn.begun.ids, turn.begun.said) == ((1, 2, 3), "w1 w2 w3 ")
            assert [item.parts[0].text for item in turn.history] == ["tell me"]
            await other.send("conversation.item.retrieve", item_id=item_id)
            kept = (await other.until("conversation.item.retrieved"))["item"]["content"][0]
            assert base64.b64decode(kept["audio"]) == made
            # A barge-in at once: what was heard is that before the loss, and moments more.
            await other.send("response.create")
            await other.until("response.done")
            assert [i.role for i in two.orchestrator.turns[-1].history] == ["user", "assistant"]


async def test_a_client_gets_again_what_it_may_lack(tmp_path):
    """It has got nothing behind the settings, and heard nothing; the response is made anew."""
    async with (
        gateway(tmp_path, [story(3, 5)]) as one,
        gateway(tmp_path, [[*story(0, 5)[:-1], done("w1 w2 w3 ")]]) as two,
        one.socket() as socket,
    ):
        client = await Client(socket).begin()
        early = client.last_id
        await ask(socket, "tell me")
        ended = (await client.until("response.done"))["response"]
        await is_kept(
            two, client.token, lambda kept: b"completed" in kept.records.get("latest", b"")
        )
        async with two.socket(resume=client.token, after=early, heard_ms=0) as socket2:
            other = Client(socket2)
            again = (await other.until("response.done"))["response"]
            assert (again["id"], again["status"]) == (ended["id"], "completed")
            kinds = [event["type"] for event in other.events]
            items = [e["item"]["id"] for e in other.of("conversation.item.added")]
            assert items == [e["item"]["id"] for e in client.of("conversation.item.added")]
            assert kinds.index("session.resumed") < kinds.index("response.created")
            assert "".join(e["delta"] for e in other.of(TEXT)) == "w1 w2 w3 "
            assert other.audio == client.audio


async def test_a_response_that_cannot_go_on_fails(tmp_path):
    gate = asyncio.Event()
    async with (
        gateway(tmp_path, [story(3, 5, gate)]) as one,
        gateway(tmp_path) as two,
        one.socket() as socket,
    ):
        client = await Client(socket).begin()
        content = [{"type": "input_text", "text": "hi"}]
        context = [{"type": "message", "role": "user", "content": content}]
        await client.send("response.create", response={"input": context})
        while sum(map(len, client.audio.values())) < 5 * 3840:
            await client.next()
        await is_kept(
            two, client.token, lambda kept: b"in_progress" in kept.records.get("latest", b"")
        )
        at = {"after": client.last_id, "heard_ms": "80"}
        async with two.socket(resume=client.token, **at) as socket2:
            other = Client(socket2)
            failed = (await other.until("response.done"))["response"]
            assert failed["status_details"]["error"]["code"] == "server_lost"
            await ask(socket2, "again")
            assert (await other.until("response.done"))["response"]["status"] == "completed"
        gate.set()


async def test_speech_that_is_not_committed_comes_again_from_the_client(tmp_path):
    async with gateway(tmp_path) as one, gateway(tmp_path) as two, one.socket() as socket:
        client = await Client(socket).begin()
        silence, said = bytes(4800), voice(100)
        n_sent = 1  # session.update
        for pcm in [silence] * 3 + [said] * 4:
            audio = base64.b64encode(pcm).decode()
            await client.send("input_audio_buffer.append", audio=audio)
            n_sent += 1
        await client.until("input_audio_buffer.speech_started")
        await is_kept(two, client.token, lambda kept: "head" in kept.records)
        async with two.socket(resume=client.token, after=client.last_id) as socket2:
            other = Client(socket2)
            n = (await other.until("session.resumed"))["events_received"]
            # All of the utterance.
            assert n <= 4 and two.orchestrator.turns == []
            for pcm in ([silence] * 3 + [said] * 4)[n - 1 :] + [silence] * 12:
                audio = base64.b64encode(pcm).decode()
                await other.send("input_audio_buffer.append", audio=audio)
            await other.until("response.done")
            [part] = two.orchestrator.turns[0].history[-1].parts
            assert isinstance(part, AudioPart) and 0.4 <= part.duration_s <= 1.2


async def test_a_committed_turn_does_not_come_again(tmp_path):
    async with gateway(tmp_path) as one, gateway(tmp_path) as two, one.socket() as socket:
        client = await Client(socket).begin()
        for pcm in [voice(100)] * 6 + [bytes(4800)] * 12:
            audio = base64.b64encode(pcm).decode()
            await client.send("input_audio_buffer.append", audio=audio)
        await client.until("response.done")
        heard = one.orchestrator.turns[0].history[-1]
        await is_kept(
            two, client.token, lambda kept: b"completed" in kept.records.get("latest", b"")
        )
        async with two.socket(resume=client.token, after=client.last_id) as socket2:
            other = Client(socket2)
            n = (await other.until("session.resumed"))["events_received"]
            assert n >= 1 + 6 + 4
            await ask(socket2, "and now?")
            await other.until("response.done")
            speech, answer, asked = two.orchestrator.turns[-1].history
            assert speech.key == heard.key
            assert speech.parts[0].n_samples == heard.parts[0].n_samples
            assert [type(one.parts[0]) for one in (answer, asked)] == [TextPart, TextPart]


async def test_a_failed_response_stays_as_it_was(tmp_path):
    failing = [TranscriptDelta("One ", 1), AudioDelta(tone(80)), StageFailedError("it fell")]
    async with (
        gateway(tmp_path, [failing]) as one,
        gateway(tmp_path) as two,
        one.socket() as socket,
    ):
        client = await Client(socket).begin()
        await ask(socket)
        ended = await client.until("response.done")
        assert ended["response"]["status"] == "failed"
        await is_kept(two, client.token, lambda kept: b"failed" in kept.records.get("latest", b""))
        async with two.socket(resume=client.token, after=client.last_id) as socket2:
            other = Client(socket2)
            await other.until("session.resumed")
            await ask(socket2)
            await other.until("response.done")
            assert len(other.of("response.done")) == 1


async def test_a_gateway_without_the_journal_knows_no_such_token(tmp_path):
    async with (
        gateway(tmp_path) as one,
        listening(app_of(FakeOrchestrator())) as address,
        one.socket() as socket,
    ):
        client = await Client(socket).begin()
        query = urlencode({"resume": client.token})
        async with connect(f"ws://{address}/v1/realtime?{query}") as other:
            assert refused(await Client(other).next()) == "invalid_resume_token"
        await ask(socket)
        await until(socket, "response.done")


async def test_an_output_of_a_function_that_the_lost_gateway_called_is_accepted(tmp_path):
    called = [TranscriptDelta("One ", 1), done(item=history_item_of("One"), function_calls=(CALL,))]
    async with (
        gateway(tmp_path, [called]) as one,
        gateway(tmp_path) as two,
        one.socket() as socket,
    ):
        client = await Client(socket).begin(tools=[WEATHER], output_modalities=["text"])
        early = client.last_id
        await ask(socket)
        ended = (await client.until("response.done"))["response"]
        text, call = ended["output"]
        await is_kept(
            two, client.token, lambda kept: b"completed" in kept.records.get("latest", b"")
        )
        async with two.socket(resume=client.token, after=early) as socket2:
            other = Client(socket2)
            again = (await other.until("response.done"))["response"]
            # What was called is not called anew.
            assert again["output"] == ended["output"] and two.orchestrator.turns == []
            answer = {"type": "function_call_output", "call_id": call["call_id"], "output": "Hot."}
            await other.send("conversation.item.create", item=answer)
            await other.send("response.create")
            await other.until("response.done")
            [turn] = two.orchestrator.turns
            roles = [(item.role, item.token_ids) for item in turn.history]
            assert roles == [("user", None), ("assistant", (1,)), ("tool", None)]
            shown = [e["item"]["id"] for e in other.of("conversation.item.added")]
            assert shown[:3] == [e["item"]["id"] for e in client.of("conversation.item.added")][:3]
            assert text["id"] in shown


async def test_a_long_conversation_is_as_it_was_wherever_it_has_changed(tmp_path):
    """Also twice: the second gateway has not written what it has not changed."""
    async with (
        gateway(tmp_path, [spoken("A long story.", 2000)]) as one,
        gateway(tmp_path, [spoken("Yes.")]) as two,
        gateway(tmp_path) as three,
        one.socket() as socket,
    ):
        client = await Client(socket).begin()
        await ask(socket, "first")
        story = (await client.until("response.done"))["response"]["output"][0]["id"]

        async def add(to: Client, name: str, after: str | None = None) -> None:
            content = [{"type": "input_text", "text": name}]
            item = {"type": "message", "role": "user", "content": content, "id": name}
            place = {"previous_item_id": after} if after else {}
            await to.send("conversation.item.create", item=item, **place)
            await to.until("conversation.item.done")

        for n in range(30):
            await add(client, f"n{n}")
        await client.send("conversation.item.delete", item_id="n3")
        await add(client, "between", after="n5")
        await add(client, "top", after="root")
        cut = {"item_id": story, "content_index": 0, "audio_end_ms": 500}
        await client.send("conversation.item.truncate", **cut)
        await client.until("conversation.item.truncated")
        kept = ["top", *(f"n{n}" for n in (0, 1, 2, 4, 5)), "between"]
        kept += [f"n{n}" for n in range(6, 30)]
        await is_kept(two, client.token, lambda kept: has_cut(kept, story))
        async with two.socket(resume=client.token, after=client.last_id) as socket2:
            other = Client(socket2)
            resumed = await other.until("session.resumed")
            assert [one for one in resumed["items"] if one in kept] == kept
            assert len(resumed["items"]) == len(kept) + 2
            assert not other.of("conversation.item.added"), "the client lacks none"
            await add(other, "late", after="n10")
            await other.send("conversation.item.delete", item_id="n20")
            await other.until("conversation.item.deleted")
            order = [*resumed["items"]]
            order.insert(order.index("n10") + 1, "late")
            order.remove("n20")
            await is_kept(three, other.token, lambda kept: "i:n20" not in kept.records)
            async with three.socket(resume=other.token, after=other.last_id) as socket3:
                last = Client(socket3)
                assert (await last.until("session.resumed"))["items"] == order
                assert not last.of("conversation.item.added")
                await ask(socket3, "and?")
                await last.until("response.done")
                said = [item.parts[0].text for item in three.orchestrator.turns[0].history]
                assert said[0] == "top" and "late" in said and "n20" not in said
                assert said[2] != "A long story.", "it was cut"


def has_cut(kept, item_id: str) -> bool:
    """Whether the journal has the end of what was heard of the item: 500 ms."""
    return b"\xcd\x01\xf4" in kept.records[f"i:{item_id}"]


async def test_a_barge_in_at_the_other_gateway_truncates_to_what_was_heard(tmp_path):
    words = [TranscriptDelta(f"w{n} ", n) for n in range(1, 11)]
    whole = history_item_of("w1 w2 w3 w4 w5 w6 w7 w8 w9 w10")
    steps = [*words, *(AudioDelta(tone(80)) for _ in range(50)), done(item=whole, n_frames=50)]
    async with (
        gateway(tmp_path, [steps]) as one,
        gateway(tmp_path) as two,
        one.socket() as socket,
    ):
        client = await Client(socket).begin()
        await ask(socket)
        await client.until("response.done")
        [item_id] = client.audio
        await is_kept(
            two, client.token, lambda kept: b"completed" in kept.records.get("latest", b"")
        )
        at = {"after": client.last_id, "heard_ms": "1000"}
        async with two.socket(resume=client.token, **at) as socket2:
            other = Client(socket2)
            await other.until("session.resumed")
            for pcm in [voice(100)] * 8:
                audio = base64.b64encode(pcm).decode()
                await other.send("input_audio_buffer.append", audio=audio)
            cut = await other.until("conversation.item.truncated")
            assert cut["item_id"] == item_id and 1000 <= cut["audio_end_ms"] < 2500
            for _ in range(12):
                audio = base64.b64encode(bytes(4800)).decode()
                await other.send("input_audio_buffer.append", audio=audio)
            await other.until("response.done")
            seen = two.orchestrator.turns[-1].history[1]
            assert seen.token_ids is not None and 1 <= len(seen.token_ids) < 10
            assert seen.key != whole.key


async def test_a_transcription_session_goes_on_as_one(tmp_path):
    async with (
        gateway(tmp_path) as one,
        gateway(tmp_path) as two,
        one.socket(intent="transcription") as socket,
    ):
        client = Client(socket)
        await client.until("session.created")
        update = {"type": "transcription", "resumable": True}
        await client.send("session.update", session=update)
        await client.until("session.updated")
        await is_kept(two, client.token, lambda kept: "head" in kept.records)
        async with two.socket(resume=client.token) as socket2:
            resumed = await Client(socket2).until("session.resumed")
            assert resumed["session"]["type"] == "transcription"
