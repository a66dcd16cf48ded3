"""What the sounds of a long conversation take, and what remains of them."""

import asyncio
import base64

import numpy as np
import pytest

from sglang_live.core import AudioPart, HistoryItem
from sglang_live.gateway.call.conversation.assistant_item import AssistantItem
from sglang_live.gateway.call.conversation.conversation import Conversation, ItemBudget
from sglang_live.gateway.call.conversation.items import AudioContent, MessageItem
from sglang_live.gateway.realtime.item_json import item_json
from test.unit.gateway.fakes import FakeOrchestrator, connected, services, tone

SPEECH = np.frombuffer(tone(3000, rate_hz=16_000), np.int16)


def conversation() -> Conversation:
    return Conversation(max_bytes=100_000_000, budget=ItemBudget(100_000_000))


def turn(n: int, pieces: tuple[HistoryItem, ...] = ()) -> MessageItem:
    return MessageItem(f"u{n}", "user", [AudioContent(AudioPart(SPEECH + n))], pieces)


async def settled(held: Conversation) -> None:
    if held._packing is not None:
        await held._packing


async def test_a_session_of_hours_holds_its_newest_sounds_and_little_of_the_others():
    held = conversation()
    for n in range(20):
        held.insert(turn(n))
    await settled(held)
    sizes = [item.size_bytes for item in held.items]
    assert sizes[-2:] == [SPEECH.nbytes] * 2
    assert max(sizes[:-2]) < 0.3 * SPEECH.nbytes
    assert held.budget.used_bytes == sum(sizes)
    keys = [item.history().key for item in held.items]
    for n, item in enumerate(held.items):
        (part,) = item.history().parts
        assert part.n_samples == len(SPEECH)
        assert np.abs(part.pcm - (SPEECH + n)).max() < 0.01 * SPEECH.max()
        assert item.content[0].audio is part
    assert len(set(keys)) == 20
    held.close()
    assert held.budget.used_bytes == 0


async def test_the_pieces_of_a_turn_are_stretches_of_the_one_sound_that_is_kept():
    parts = [AudioPart(SPEECH[:20_000].copy()), AudioPart(SPEECH[20_000:40_000].copy())]
    pieces = tuple(
        HistoryItem(key=f"p{n}", role="user", parts=(part,), opens=not n, closes=bool(n))
        for n, part in enumerate(parts)
    )
    held, item = conversation(), turn(0, pieces)
    for _ in range(2):
        sounds = [piece.parts[0] for piece in item.pieces()]
        assert all(part.sound is item.content[0].audio.sound for part in sounds)
        assert [part.n_samples for part in sounds] == [20_000, 20_000]
        assert [piece.key for piece in item.pieces()] == ["p0", "p1"]
        np.testing.assert_allclose(
            np.concatenate([part.pcm for part in sounds]), SPEECH[:40_000], atol=80
        )
        for other in (item, turn(1), turn(2)):
            if other.id not in held:
                held.insert(other)
        await settled(held)
    assert item.content[0].audio.is_packed


async def test_a_response_is_packed_when_it_has_been_sent_and_is_retrieved_as_it_was_truncated():
    held = conversation()
    response = AssistantItem("a0", "audio")
    audio = tone(2000)
    held.insert(response)
    response.made_bytes = len(audio)
    for n in range(3):
        held.insert(turn(n))
    await settled(held)
    assert isinstance(response.audio, bytearray)
    response.audio_sent(audio[:48_000])
    response.close("completed")
    response.audio_sent(audio[48_000:])
    held.insert(turn(3))
    await settled(held)
    assert response.size_bytes < 0.3 * len(audio)
    response.truncate(500)
    [content] = item_json(response, response.audio_format)["content"]
    shown = np.frombuffer(base64.b64decode(content["audio"]), "<i2")
    assert len(shown) == 12_000
    np.testing.assert_allclose(shown, np.frombuffer(audio, "<i2")[:12_000], atol=120)


async def test_a_sound_is_not_packed_before_it_is_known_whether_it_is_speech():
    held = conversation()
    heard: list[int] = []
    content = [AudioContent(AudioPart(SPEECH))]
    unjudged = MessageItem("a", "user", content, is_speech=lambda pcm: heard.append(len(pcm)))
    for item in (unjudged, turn(1), turn(2), turn(3)):
        held.insert(item)
    await settled(held)
    assert [item.content[0].audio.is_packed for item in held.items] == [False, True, False, False]
    unjudged.judge()
    held.insert(turn(4))
    await settled(held)
    assert unjudged.content[0].audio.is_packed and unjudged.is_silent
    assert unjudged.history() is None and heard == [len(SPEECH)]


async def test_items_that_leave_while_they_are_packed_are_not_counted():
    held = conversation()
    for n in range(6):
        held.insert(turn(n))
    for item in held.items[:4]:
        held.delete(item)
    await settled(held)
    assert held.budget.used_bytes == 2 * SPEECH.nbytes


async def test_older_turns_are_retrieved_and_sent_to_the_model_with_their_speech():
    orchestrator = FakeOrchestrator()
    shared = services(orchestrator)
    async with connected(orchestrator, shared) as client:
        client.turn_detection(None)
        await client.expect("session.updated")
        ids = []
        for _ in range(5):
            client.append(tone(2000))
            client.send("input_audio_buffer.commit")
            ids.append((await client.find("input_audio_buffer.committed"))["item_id"])
            client.send("response.create")
            await client.until("response.done")
        async with asyncio.timeout(30):
            while shared.item_budget.used_bytes > 2.5 * 64_000:
                await client.settle()
        client.send("conversation.item.retrieve", item_id=ids[0])
        retrieved = await client.find("conversation.item.retrieved")
        sent = np.frombuffer(tone(2000), "<i2").astype(float)
        audio = base64.b64decode(retrieved["item"]["content"][0]["audio"])
        shown = np.frombuffer(audio, "<i2").astype(float)
        middle = slice(4_800, -4_800)
        assert np.corrcoef(shown[: len(sent)][middle], sent[middle])[0, 1] > 0.999
        client.send("response.create")
        await client.until("response.done")
    users = [item for item in orchestrator.turns[-1].history if item.role == "user"]
    assert [item.parts[0].duration_s for item in users] == [pytest.approx(2, abs=0.01)] * 5
