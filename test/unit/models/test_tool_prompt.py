"""Functions in Qwen's prompts, and the speech in a response with calls."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.models.tool_prompt import ResponseParts, instructions_with, opening_of

WEATHER = json.dumps({"name": "weather", "parameters": {"type": "object"}})


SYSTEM = "<|im_start|>system\n", "<|im_end|>"


class FakeTokenizer:
    """knows: whether its chat template supports functions."""

    def __init__(self, knows: bool):
        self.knows = knows

    def apply_chat_template(self, messages, tools, tokenize):
        assert not tokenize
        text = messages[0]["content"]
        if self.knows:
            text += f" You may use <tool_call>: {json.dumps(tools)}"
        return f"<|im_start|>system\n{text}<|im_end|>\n<|im_start|>user\n"


def test_the_checkpoints_template_describes_functions():
    text = instructions_with(FakeTokenizer(True), "Be brief.", [WEATHER], SYSTEM)
    assert text.startswith("Be brief. You may use <tool_call>")
    assert '"weather"' in text and "<|im" not in text


def test_a_template_without_functions_gets_our_own_description():
    text = instructions_with(FakeTokenizer(False), "Be brief.", [WEATHER], SYSTEM)
    assert text.startswith("Be brief.\n\n")
    assert WEATHER in text and "<tool_call>" in text
    assert instructions_with(FakeTokenizer(False), "", [WEATHER], SYSTEM)[0].isalpha()


def test_without_functions_instructions_stay_as_they_are():
    assert instructions_with(FakeTokenizer(True), "Be brief.", [], SYSTEM) == "Be brief."


def test_a_required_call_has_a_forced_beginning():
    assert opening_of("weather") == '<tool_call>\n{"name": "weather", "arguments": '
    assert opening_of("") == '<tool_call>\n{"name": '


REPLY = 'One moment. <tool_call>\n{"name": "weather"}\n</tool_call><tool_call>{"name": "time"}'


@pytest.mark.parametrize("begin_id", [60, None], ids=["one token", "several"])
def test_only_text_before_the_first_call_is_spoken(begin_id):
    """A token a character; of the tag, if it is one token, one."""
    parts, text, ids = ResponseParts(begin_id), "", []
    at = REPLY.index("<tool_call>")
    for n, character in enumerate(REPLY):
        text += character
        if begin_id is None or n < at:
            ids.append(ord(character))
        elif n == at + len("<tool_call>") - 1:
            ids.append(begin_id)
        parts.take(ids, text)
        assert "One moment. ".startswith(parts.spoken)
        assert "<" not in parts.spoken
    parts.end(ids, text)
    assert parts.spoken == "One moment."
    assert parts.n_spoken == at
    assert parts.calls() == ['{"name": "weather"}', '{"name": "time"}']


def test_an_unfinished_beginning_of_a_call_is_spoken_at_the_end():
    parts = ResponseParts(None)
    parts.take([1, 2], "a <")
    assert (parts.n_spoken, parts.spoken) == (0, "")
    parts.take([1, 2, 3], "a < b")
    assert (parts.n_spoken, parts.spoken) == (3, "a < b")
    parts.take([1, 2, 3, 4], "a < b <tool")
    parts.end([1, 2, 3, 4], "a < b <tool")
    assert (parts.n_spoken, parts.spoken) == (4, "a < b <tool")
    assert parts.calls() == []


_TAGGED = st.lists(
    st.sampled_from(["<tool_call>", "</tool_call>", '"', "\\", "{", "}", "\n", "a"]), max_size=8
).map("".join)


@given(st.lists(_TAGGED, min_size=1, max_size=3), st.booleans())
def test_tags_in_strings_of_a_call_do_not_end_it(strings, ends):
    """A model that wants to end the call within a string writes the tag there."""
    written = [json.dumps({"name": "note", "arguments": {"text": text}}) for text in strings]
    text = "".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)
    if not ends:
        text = text.removesuffix("</tool_call>")
    parts = ResponseParts(None)
    parts.take([1], text)
    parts.end([1], text)
    assert parts.calls() == written


def test_a_call_that_is_no_json_ends_at_the_next_tag():
    parts = ResponseParts(None)
    parts.take([1], '<tool_call>{"a": <tool_call>{} x</tool_call> y<tool_call>[')
    assert parts.calls() == ['{"a":', "{} x", "["]


@given(st.text(alphabet="<tolcal_>/ x", max_size=60))
def test_speech_grows_and_never_contains_the_tag(text):
    parts, before = ResponseParts(None), ""
    for n in range(1, len(text) + 1):
        parts.take(list(range(n)), text[:n])
        assert "<tool_call>" not in parts.spoken
        assert parts.spoken.startswith(before.rstrip())
        before = parts.spoken
    parts.end(list(range(len(text))), text)
    assert parts.spoken or parts.calls() or not text.strip()
