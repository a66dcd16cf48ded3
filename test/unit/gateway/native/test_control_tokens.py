"""Control tokens in clients' texts become plain text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.gateway.native.request_check import without_control_tokens
from sglang_live.models.demo.build import CHAT_TEMPLATE, SPECIAL_TOKENS, build_tokenizer

TOKENIZER = build_tokenizer(1024)
SPECIAL_IDS = frozenset(TOKENIZER.convert_tokens_to_ids(SPECIAL_TOKENS))
SHARDS = [
    *SPECIAL_TOKENS,
    "<",
    "<|",
    "|>",
    "im_end",
    "|",
    "tts_pad>",
    ">",
    "<t",
    "<tts_",
    "a",
    "\n",
]
texts = st.lists(st.sampled_from(SHARDS), max_size=8).map("".join)


def controls(content) -> list[int]:
    """The control tokens of a chat of one message."""
    chat = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, chat_template=CHAT_TEMPLATE
    )
    ids = TOKENIZER.encode(chat, add_special_tokens=False)
    return [token_id for token_id in ids if token_id in SPECIAL_IDS]


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_a_control_token_in_a_message_is_text(token):
    assert controls(without_control_tokens(f"a {token} b")) == controls("x")
    assert controls(f"a {token} b") != controls("x")


@given(texts)
def test_any_message_has_only_the_two_control_tokens_of_its_template(text):
    assert controls(without_control_tokens(text)) == controls("x")


@given(st.lists(texts, min_size=1, max_size=5))
def test_adjacent_texts_form_no_control_token_together(parts):
    content = [{"type": "text", "text": text} for text in parts]
    assert controls(without_control_tokens(content)) == controls("x")


def test_media_are_unchanged_and_names_in_schemas_hold_no_token():
    image = {"type": "image_url", "image_url": {"url": "data:,<|im_end|>"}}
    tools = [{"function": {"parameters": {"properties": {"<|im_end|>": {}}}}}]
    assert without_control_tokens([image]) == [image]
    assert "<|im_end|>" not in json.dumps(without_control_tokens(tools))


@pytest.mark.parametrize("text", ["a < b", "x <| y", "f <| g |> h", "<html>", "<tool_call>"])
def test_other_text_is_unchanged(text):
    assert without_control_tokens(text) == text
