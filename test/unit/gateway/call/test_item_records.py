"""Items as records: what another gateway makes of them is the same, to client and model."""

import dataclasses

import numpy as np
import pytest

from sglang_live.core import AudioPart, HistoryItem, ImagePart, TextPart, TurnDone, Usage
from sglang_live.gateway.audio.codec import PCMU
from sglang_live.gateway.call.conversation.assistant_item import AssistantItem
from sglang_live.gateway.call.conversation.item_records import (
    items_of,
    media_of,
    medium_record,
    record_of,
    state_of,
)
from sglang_live.gateway.call.conversation.items import (
    AudioContent,
    FunctionCallItem,
    FunctionItem,
    ImageContent,
    Item,
    MessageItem,
    TextContent,
    call_as_text,
)
from sglang_live.gateway.realtime.item_json import item_json
from sglang_live.gateway.tools import FunctionCall
from sglang_live.sound.packed import PackedSound


def noise(n: int) -> np.ndarray:
    return np.random.default_rng(n).normal(0, 3000, n).astype(np.int16)


def again(*items: Item) -> list[Item]:
    sounds = {
        (item.id, n): medium_record(audio)
        for item in items
        for n, audio in enumerate(media_of(item))
    }
    return items_of([record_of(item) for item in items], lambda *at: sounds[at])


def seen(item: HistoryItem) -> tuple:
    parts = [
        part
        if isinstance(part, TextPart)
        else (getattr(part, "begin", 0), getattr(part, "n_samples", 0), part.digest)
        for part in item.parts
    ]
    return item.key, item.role, parts, item.token_ids, item.opens, item.closes


def same(one: Item, other: Item) -> None:
    assert type(one) is type(other)
    assert item_json(one) == item_json(other)
    assert list(map(seen, one.pieces())) == list(map(seen, other.pieces()))
    assert (one.call_id, one.answers, state_of(one)) == (
        other.call_id,
        other.answers,
        state_of(other),
    )


def message(role: str, *content, **settings) -> MessageItem:
    return MessageItem("item_1", role, content, **settings)


def heard(n: int, transcript: str | None = None) -> AudioContent:
    return AudioContent(AudioPart(noise(n)), transcript)


@pytest.mark.parametrize(
    "item",
    [
        message("user", TextContent("input_text", "Grüße, 世界")),
        message("system", TextContent("input_text", "")),
        message("assistant", TextContent("output_text", "yes"), TextContent("output_text", "no")),
        message("user", heard(4000, "words"), TextContent("input_text", "and"), heard(16_000)),
        message("user", AudioContent(AudioPart(np.zeros(0, np.int16)))),
        message("user", heard(4000), ImageContent(ImagePart(b"png", 3, 2), "low"), heard(800)),
    ],
    ids=["text", "empty", "several", "sounds", "no sound", "picture"],
)
def test_a_message_is_the_same(item):
    [other] = again(item)
    # FLAC of rounded samples is not what it was made of; its digest says of which.
    same(item, other)


def test_a_message_of_packed_sound_is_the_same():
    packed = AudioPart(PackedSound.of(noise(16_000)))
    item = message("user", AudioContent(packed, "words"))
    [other] = again(item)
    same(item, other)
    assert (media_of(other)[0].pcm == packed.pcm).all()


def test_pieces_of_an_utterance_keep_keys_and_stretches():
    pcm = noise(10_000)
    pieces = (
        HistoryItem(key="k1", role="user", parts=(AudioPart(pcm[:4000]),), closes=False),
        HistoryItem(
            key="k2", role="user", parts=(AudioPart(pcm[4000:9000]),), opens=False, closes=False
        ),
        HistoryItem(key="k3", role="user", parts=(), opens=False),
    )
    item = message("user", AudioContent(AudioPart(pcm)), pieces=pieces)
    [other] = again(item)
    rows = [
        [(one.key, one.opens, one.closes, [(p.begin, p.n_samples) for p in one.parts]) for one in i]
        for i in (item.pieces(), other.pieces())
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 3


def test_words_of_an_utterance_keep_their_keys():
    said = HistoryItem(key="k1", role="user", parts=(TextPart("what was said"),))
    item = message("user", heard(4000), pieces=(said,))
    [other] = again(item)
    assert [(one.key, one.parts) for one in other.pieces()] == [
        ("k1", (TextPart(said.parts[0].text),))
    ]


def test_a_turn_without_speech_stays_out_of_the_history():
    item = message("user", heard(4000), is_speech=lambda pcm: False)
    item.judge()
    [other] = again(item)
    assert other.pieces() == () and other.is_silent
    same(item, other)


def speech(**fields) -> AssistantItem:
    return AssistantItem("item_2", "audio", **fields)


def whole(text: str, n_tokens: int, **fields) -> TurnDone:
    ids = tuple(range(100, 100 + n_tokens))
    item = HistoryItem(key="response-7", role="assistant", parts=(TextPart(text),), token_ids=ids)
    return TurnDone(status="completed", reason=None, item=item, usage=Usage(), **fields)


def said(n_words: int, n_frames: int = 0, **fields) -> AssistantItem:
    item = speech(**fields)
    for n in range(1, n_words + 1):
        item.add_text(f"w{n} ", n)
    item.made_bytes = n_frames * 3840
    for _ in range(n_frames):
        item.audio_sent(bytes(3840))
    return item


def test_a_response_keeps_its_tokens_and_how_far_it_was_heard():
    items = [said(4, 8), said(4, 8), said(4, 8, speed=1.5), said(4, 8, audio_format=PCMU)]
    items[0].set_end(whole("w1 w2 w3 w4 ", 4, n_frames=8))
    items[0].close("completed")
    items[1].close("incomplete", stopped=True)
    items[1].end_playback(333.25)
    items[1].set_end(whole("w1 w2 w3 w4 ", 4, n_frames=8, spoken=False))
    items[2].add_spoken([(2, 0.25), (4, 0.5)])
    items[2].set_end(whole("w1 w2 w3 w4 ", 4, n_frames=8))
    items[2].close("completed")
    items[2].truncate(200)
    for item in items:
        [other] = again(item)
        same(item, other)
        # And what becomes of it later.
        for one in (item, other):
            if one.status == "in_progress":
                one.close("incomplete", stopped=True)
            one.truncate(150)
        assert item.visible_text == other.visible_text
        ids = [one.history() and one.history().token_ids for one in (item, other)]
        assert ids[0] == ids[1]


def test_a_response_in_writing_is_the_same():
    item = AssistantItem("item_3", "text")
    item.add_text("words", 1)
    item.set_end(whole("words", 1))
    item.close("completed")
    [other] = again(item)
    same(item, other)


def test_calls_and_their_outputs_are_the_same_with_and_without_their_carrier():
    end = whole("w1 ", 1, function_calls=("{}",))
    carrier = said(1)
    carrier.set_end(end)
    carrier.close("completed")
    calls = [FunctionCallItem(FunctionCall("f", '{"x": 1}'), end.item, carrier) for _ in range(2)]
    alone = FunctionCallItem(FunctionCall("g", "{}"), end.item, None)
    fields = {"call_id": "call_1", "name": "f", "arguments": "{}"}
    written = FunctionItem("item_4", "function_call", fields, call_as_text("f", "{}"))
    output = {"call_id": "call_1", "output": "42"}
    history = HistoryItem(key="key_5", role="tool", parts=(TextPart("42"),))
    answer = FunctionItem("item_5", "function_call_output", output, history)
    items = [carrier, *calls, alone, written, answer]
    for one, other in zip(items, again(*items), strict=True):
        same(one, other)
    carrier.has_left = True
    for one, other in zip(items[1:], again(*items[1:]), strict=True):
        same(one, other)
    assert calls[0].history() is not None


def test_every_change_of_a_response_changes_its_state():
    item = said(2, 2)
    states = [state_of(item)]
    for change in (
        lambda: item.add_text("more", 3),
        lambda: item.audio_sent(bytes(3840)),
        lambda: item.set_end(whole("w1 w2 more", 3)),
        lambda: item.close("completed"),
        lambda: item.end_playback(50.0),
        lambda: item.truncate(20),
    ):
        change()
        states.append(state_of(item))
    assert len({*states}) == len(states)


def test_no_field_of_a_response_is_forgotten():
    """But for its audio, which is too large."""
    names = {one.name for one in dataclasses.fields(AssistantItem)} - {"audio"}
    values = {
        "id": "item_9",
        "modality": "audio",
        "audio_format": PCMU,
        "frames_per_token": 2.5,
        "speed": 1.25,
        "status": "completed",
        "text": "w1 ",
        "made_bytes": 640,
        "sent_bytes": 320,
        "stopped": True,
        "heard_ms": 12.5,
        "truncated_ms": 11,
        "marks": [(1, 3)],
        "spoken": [(1, 0.5)],
        "end": whole("w1 ", 1, n_frames=4, spoken=False, function_calls=("{}",)),
        "_history": HistoryItem(key="k", role="assistant", parts=(), token_ids=()),
    }
    assert values.keys() == names
    item = AssistantItem(**values)
    [other] = again(item)
    for name in names - {"end", "_history"}:
        assert getattr(other, name) == values[name], name
    same(item, other)
    assert (other.end.n_frames, other.end.spoken, other.end.function_calls) == (4, False, ("{}",))
