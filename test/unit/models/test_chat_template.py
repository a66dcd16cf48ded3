"""Prompts of any chat template in pieces against the template itself."""

from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_live.core import HistoryItem, TextPart
from sglang_live.errors import BadInputError
from sglang_live.models.cascade.parts import TemplatePrompt
from sglang_live.models.demo.build import build_tokenizer

BASE = build_tokenizer(1024)
# Forms of published templates, in few words. Each with its special tokens and its end of a turn.
CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "<|begin|>{% for m in messages %}<|head|>{{ m['role'] }}<|/head|>\n\n"
    "{{ m['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
GEMMA = (
    "<bos>{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles alternate') }}{% endif %}<start_of_turn>"
    "{{ 'model' if m['role'] == 'assistant' else 'user' }}\n{{ m['content'] }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
)
# As Qwen3's: the thoughts of earlier responses are left out, and those of the next may be.
THINKING = CHATML.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}",
)
TEMPLATES = {
    "thinking": (THINKING, ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "chatml": (CHATML, ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "llama": (LLAMA, ["<|begin|>", "<|head|>", "<|/head|>", "<|eot|>"], "<|eot|>"),
    "gemma": (GEMMA, ["<bos>", "<start_of_turn>", "<end_of_turn>"], "<end_of_turn>"),
    "mistral": (MISTRAL, ["<s>", "</s>", "[INST]", "[/INST]"], "</s>"),
}
HAS_SYSTEM = ("chatml", "llama", "thinking")
# Without the beginning of a special token: the template takes one in a user's text for its own.
words = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="<["), min_size=1, max_size=12
).filter(lambda text: text == text.strip())


def tokenizer_of(name: str):
    template, special, _ = TEMPLATES[name]
    tokenizer = deepcopy(BASE)
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = template
    return tokenizer


TOKENIZERS = {name: tokenizer_of(name) for name in TEMPLATES}


def prompt_of(name: str) -> TemplatePrompt:
    tokenizer, end = TOKENIZERS[name], TEMPLATES[name][2]
    return TemplatePrompt(tokenizer, tokenizer.encode(end, add_special_tokens=False))


def said(role: str, text: str, ids: tuple[int, ...] | None = None) -> HistoryItem:
    return HistoryItem(key="k", role=role, parts=(TextPart(text),), token_ids=ids)


def ids_of(prompt: TemplatePrompt, pieces: list) -> list[int]:
    appends = prompt.appends(pieces)
    assert all(not append.clips for append in appends)
    return [i for append in appends for i in append.token_ids]


def whole(name: str, messages: list[tuple[str, str]]) -> list[int]:
    tokenizer = TOKENIZERS[name]
    listed = [{"role": role, "content": text} for role, text in messages]
    text = tokenizer.apply_chat_template(
        listed, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(texts=st.lists(words, min_size=1, max_size=5).filter(lambda t: len(t) % 2), system=words)
def test_pieces_give_the_ids_of_the_whole(name, texts, system):
    prompt = prompt_of(name)
    messages = [("assistant" if n % 2 else "user", text) for n, text in enumerate(texts)]
    head = [("system", system)] if name in HAS_SYSTEM else []
    pieces = prompt.header(system if head else "")
    for role, text in messages:
        pieces += prompt.item(said(role, text))
    pieces += prompt.open_response()
    assert ids_of(prompt, pieces) == whole(name, [*head, *messages])


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_utterance_in_pieces_gives_the_ids_of_the_whole(name):
    prompt = prompt_of(name)
    texts = ["Hello there.", " How are you?", ""]
    pieces = prompt.header("")
    for n, text in enumerate(texts):
        part = replace(said("user", text), opens=n == 0, closes=n == len(texts) - 1)
        pieces += prompt.item(part)
    pieces += prompt.open_response()
    tokenizer = TOKENIZERS[name]
    whole_ids = whole(name, [("user", "Hello there. How are you?")])
    ids = ids_of(prompt, pieces)
    assert tokenizer.decode(ids) == tokenizer.decode(whole_ids)
    # Without special tokens around a message a token may span markup and words.
    assert ids == whole_ids or name == "mistral"


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("wrote_end", [True, False])
def test_a_generated_response_is_continued_as_the_template_would(name, wrote_end):
    prompt, end = prompt_of(name), TEMPLATES[name][2]
    answer = prompt.words("Hello you.")
    held = ids_of(prompt, [*prompt.header(""), *prompt.item(said("user", "Hi"))])
    held += ids_of(prompt, prompt.open_response()) + answer
    held += prompt.markup_ids(end) if wrote_end else []
    more = [*prompt.close_response(model_wrote_end=wrote_end), *prompt.item(said("user", "Why?"))]
    held += ids_of(prompt, [*more, *prompt.open_response()])
    again = [
        *prompt.header(""),
        *prompt.item(said("user", "Hi")),
        *prompt.item(said("assistant", "", tuple(answer))),
        *prompt.item(said("user", "Why?")),
        *prompt.open_response(),
    ]
    assert held == ids_of(prompt, again)


def test_a_model_that_may_think_answers_at_once():
    prompt = prompt_of("thinking")
    text = TOKENIZERS["thinking"].decode(ids_of(prompt, prompt.open_response()))
    assert text.endswith("assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_instructions_are_said_where_a_template_has_no_place_for_them(name):
    prompt = prompt_of(name)
    ids = ids_of(prompt, prompt.header("Be brief."))
    assert "Be brief." in TOKENIZERS[name].decode(ids)


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_of_users_never_becomes_special_tokens(name):
    prompt, special = prompt_of(name), TEMPLATES[name][1]
    hostile = "".join(special)
    plain = ids_of(prompt, prompt.item(said("user", "x")))
    ids = ids_of(prompt, prompt.item(said("user", hostile)))
    special_ids = set(TOKENIZERS[name].convert_tokens_to_ids(special))
    assert [i for i in ids if i in special_ids] == [i for i in plain if i in special_ids]


@pytest.mark.parametrize("name", TEMPLATES)
def test_functions_are_described_where_a_template_has_no_place_for_them(name):
    weather = '{"name": "weather", "parameters": {"type": "object"}}'
    text = prompt_of(name).with_functions("Be brief.", [weather])
    assert text.startswith("Be brief.") and weather in text and "<tool_call>" in text
    assert prompt_of(name).with_functions("Be brief.", []) == "Be brief."


def test_a_tokenizer_without_a_template_is_refused():
    tokenizer = deepcopy(BASE)
    tokenizer.chat_template = None
    with pytest.raises(BadInputError, match="no chat template"):
        TemplatePrompt(tokenizer, [1])


def test_a_template_that_numbers_its_messages_is_refused():
    tokenizer = deepcopy(BASE)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ loop.index }} {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    )
    with pytest.raises(BadInputError, match="chat template"):
        TemplatePrompt(tokenizer, [1])


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_templates_own_end_of_a_message_ends_a_response(name):
    """Also where the checkpoint names another token, as base models do."""
    tokenizer = TOKENIZERS[name]
    prompt = TemplatePrompt(tokenizer, [3])
    assert 3 in prompt.end_ids
    assert tokenizer.convert_tokens_to_ids(TEMPLATES[name][2]) in prompt.end_ids
