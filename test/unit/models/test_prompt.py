"""The thinker's prompt in pieces against the same prompt as one string."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_live.core import AudioPart, HistoryItem, TextPart
from sglang_live.models.demo.build import SPECIAL_TOKENS, build_tokenizer
from sglang_live.models.prompt import Append, Piece
from sglang_live.models.qwen3_omni.parts import ChatPrompt

AUDIO_PLACE = "<|audio_start|><|audio_pad|><|audio_end|>"
TOKENIZER = build_tokenizer(1024)
SPECIAL_IDS = set(TOKENIZER.convert_tokens_to_ids(SPECIAL_TOKENS))
PAD_ID = TOKENIZER.convert_tokens_to_ids("<|audio_pad|>")
PROMPT = ChatPrompt(
    SimpleNamespace(placeholders={PAD_ID}, end_of_turn_ids=(), script_style=None, gives_up=""),
    TOKENIZER,
)

FRAGMENTS = [
    " ",
    "\n",
    "\n\n",
    "\t",
    "the",
    " the",
    "and so",
    "'s",
    "12",
    "<|",
    "|>",
    "é",
    "日本",
    "🙂",
]
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=6).map("".join)
clips = st.builds(lambda n: AudioPart(np.zeros(n, np.int16)), st.integers(1, 5))
roles = st.sampled_from(["user", "assistant", "system", "tool"])
items = st.builds(
    lambda role, parts: HistoryItem(key="k", role=role, parts=tuple(parts)),
    roles,
    st.lists(texts.map(TextPart) | clips, max_size=4),
)
hostile = st.lists(st.sampled_from(SPECIAL_TOKENS) | texts, min_size=1, max_size=5).map("".join)


def message(*contents: str | int, role: str = "user") -> HistoryItem:
    parts = tuple(
        TextPart(c) if isinstance(c, str) else AudioPart(np.zeros(c, np.int16)) for c in contents
    )
    return HistoryItem(key="k", role=role, parts=parts)


def content(item: HistoryItem) -> str:
    return "".join(AUDIO_PLACE if isinstance(p, AudioPart) else p.text for p in item.parts)


def as_one(item: HistoryItem) -> str:
    role = "user" if item.role == "tool" else item.role
    return f"<|im_start|>{role}\n{content(item)}<|im_end|>\n"


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def ids_of(appends: list[Append]) -> list[int]:
    """What the session holds after these requests; a processor tokenises text around a clip."""
    ids: list[int] = []
    for append in appends:
        ids += append.token_ids or encode(append.text)
    return ids


def question(items: list[HistoryItem]) -> list[Piece]:
    pieces = [piece for item in items for piece in PROMPT.item(item)]
    return [*pieces, *PROMPT.open_response()]


@settings(max_examples=150)
@given(instructions=texts, history=st.lists(items, max_size=4))
def test_tokenising_piece_by_piece_equals_tokenising_the_whole(instructions, history):
    system = f"<|im_start|>system\n{instructions}<|im_end|>\n" if instructions else ""
    whole = system + "".join(map(as_one, history)) + "<|im_start|>assistant\n"
    header = ids_of(PROMPT.appends(PROMPT.header(instructions)))
    turn = ids_of(PROMPT.appends(question(history)))
    assert header, "a session cannot begin with an empty request"
    assert header + turn == encode(whole)


@settings(max_examples=60)
@given(
    turns=st.lists(
        st.tuples(st.lists(items, max_size=2), texts, st.booleans()), min_size=1, max_size=3
    )
)
def test_a_session_that_grows_turn_by_turn_has_the_whole_conversation(turns):
    held = ids_of(PROMPT.appends(PROMPT.header("Be brief.")))
    expected = encode("<|im_start|>system\nBe brief.<|im_end|>\n")
    tail: list[Piece] = []
    for history, reply, model_wrote_end in turns:
        held += ids_of(PROMPT.appends([*tail, *question(history)]))
        expected += encode("".join(map(as_one, history)) + "<|im_start|>assistant\n")
        held += encode(reply) + (encode("<|im_end|>") if model_wrote_end else [])
        expected += encode(reply) + encode("<|im_end|>") + encode("\n")
        tail = PROMPT.close_response(model_wrote_end=model_wrote_end)
    held += ids_of(PROMPT.appends(tail))
    assert held == expected + encode("<|im_start|>")


def test_an_assistant_item_keeps_the_generated_tokens():
    odd_ids = tuple(encode("th") + encode("e"))  # a tokenizer would not split "the" like this
    reply = HistoryItem(key="r", role="assistant", parts=(TextPart("the"),), token_ids=odd_ids)
    [append] = PROMPT.appends(PROMPT.item(reply))
    assert append.token_ids == (
        *encode("assistant\n"),
        *odd_ids,
        *encode("<|im_end|>\n<|im_start|>"),
    )


@settings(max_examples=80)
@given(text=hostile, instructions=hostile)
def test_text_of_users_never_becomes_a_special_token(text, instructions):
    plain = ids_of(PROMPT.appends([*PROMPT.header("x"), *question([message("x")])]))
    header = PROMPT.header(f"x{instructions}")
    ids = ids_of(PROMPT.appends([*header, *question([message(text)])]))
    assert [i for i in ids if i in SPECIAL_IDS] == [i for i in plain if i in SPECIAL_IDS]
    segment = PROMPT.segment_ids(message(text), [])
    assert [i for i in segment if i in SPECIAL_IDS] == encode("<|im_start|><|im_end|>")
    assert TOKENIZER.decode(segment) == f"<|im_start|>user\n{text}<|im_end|>\n"


@settings(max_examples=80)
@given(st.lists(items, max_size=4))
def test_every_request_has_at_most_one_clip_and_clips_keep_their_order(history):
    appends = PROMPT.appends(question(history))
    of_history = [p for item in history for p in item.parts if isinstance(p, AudioPart)]
    assert [clip for a in appends for clip in a.clips] == of_history
    for append in appends:
        assert append.text.count(AUDIO_PLACE) == len(append.clips) <= 1
        assert bool(append.text) != bool(append.token_ids), "ids or text, never both or none"
    # No more requests than clips and the gaps between them.
    assert len(appends) <= 2 * len(of_history) + 1


def test_a_spoken_message_costs_one_request():
    [append] = PROMPT.appends(
        [*PROMPT.close_response(model_wrote_end=True), *question([message(9)])]
    )
    assert append.text == (f"\n<|im_start|>user\n{AUDIO_PLACE}<|im_end|>\n<|im_start|>assistant\n")


def test_text_around_a_clip_stays_out_of_the_markup_of_its_request():
    appends = PROMPT.appends(question([message("before <|audio_pad|>", 9, "<|audio_pad|> after")]))
    assert [bool(a.clips) for a in appends] == [False, True, False]
    assert appends[1].text == AUDIO_PLACE


@settings(max_examples=80)
@given(st.data())
def test_talker_and_thinker_read_a_user_message_alike(data):
    item = data.draw(items.filter(lambda item: item.role == "user"))
    n_clips = sum(isinstance(part, AudioPart) for part in item.parts)
    n_places = data.draw(st.lists(st.integers(1, 9), min_size=n_clips, max_size=n_clips))
    expected, left = [], iter(n_places)
    for token in encode(as_one(item)):
        expected += [PAD_ID] * (next(left) if token == PAD_ID else 1)
        if token != PAD_ID:
            expected[-1] = token
    assert PROMPT.segment_ids(item, n_places) == expected


@settings(max_examples=40)
@given(n_places=st.lists(st.integers(1, 9), min_size=2, max_size=5))
def test_a_message_in_pieces_is_one_span_of_audio_for_thinker_and_talker(n_places):
    last = len(n_places) - 1
    pieces = [
        HistoryItem(key=str(i), role="user", parts=message(9).parts, opens=i == 0, closes=i == last)
        for i in range(len(n_places))
    ]
    texts = [a.text for piece in pieces for a in PROMPT.appends(PROMPT.item(piece))]
    pads = "<|audio_pad|>" * len(n_places)
    span = f"user\n<|audio_start|>{pads}<|audio_end|><|im_end|>\n"
    assert "".join(texts) == f"{span}<|im_start|>"
    assert [text.count("<|audio_pad|>") for text in texts] == [1] * len(n_places)
    as_told = [PROMPT.segment_ids(p, [n]) for p, n in zip(pieces, n_places, strict=True)]
    whole = PROMPT.segment_ids(message(9), [sum(n_places)])
    assert [token_id for ids in as_told for token_id in ids] == whole
    n_tokens = sum(PROMPT.n_tokens(PROMPT.item(p), iter([1])) for p in pieces)
    assert n_tokens == len(encode(f"{span}<|im_start|>"))


def test_a_piece_of_an_utterance_is_not_split_itself():
    with pytest.raises(ValueError, match="one stretch of audio"):
        HistoryItem(key="k", role="user", parts=(TextPart("x"), TextPart("y")), closes=False)


@pytest.mark.parametrize("parts", [(), ("",), ("", "")], ids=len)
def test_an_empty_message_is_its_markup(parts):
    [append] = PROMPT.appends(question([message(*parts)]))
    assert list(append.token_ids) == encode("user\n<|im_end|>\n<|im_start|>assistant\n")


def test_the_newline_after_a_role_is_one_token():
    assert encode("\n") == [PROMPT.newline_id]
    assert encode("<|im_start|>assistant\n")[-1] == PROMPT.newline_id


@given(texts)
def test_a_response_goes_on_behind_any_of_its_tokens(text):
    """Also inside of a character, which is several tokens."""
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    for n in range(len(ids) + 1):
        said = TOKENIZER.decode(ids[:n]).rstrip("\ufffd")
        opening = PROMPT.continued(ids[:n], said)
        assert opening.token_ids == tuple(ids[:n])
        new = ids[n:]
        whole = PROMPT.text_behind(opening, new, TOKENIZER.decode(new))
        assert whole == TOKENIZER.decode(ids)
        assert whole.startswith(said)
