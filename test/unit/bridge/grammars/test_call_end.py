"""Forced function calls end within their tokens, whatever the model prefers to write."""

import json
import random

import numpy as np
import pytest
import xgrammar
from jsonschema import Draft202012Validator
from sglang.srt.constrained.xgrammar_backend import GrammarStats, XGrammarGrammar

from sglang_live.bridge.grammars.call_end import CallGrammar, texts_of
from sglang_live.bridge.grammars.grammar_cache import BoundedCompiler
from sglang_live.gateway.errors import ParameterError
from sglang_live.gateway.forced_call import check_enforceable
from sglang_live.gateway.tools import read_function_call
from sglang_live.models.grammars.call_grammar import call_grammar
from test.drawn_schemas import SchemaMaker

PIECES = [
    '": "',
    '", "',
    '"}',
    "}}",
    '"], "',
    '[{"',
    "[[",
    ": ",
    ", ",
    "true",
    "</tool_call>",
    "name",
]
VOCABULARY = [*(bytes([code]) for code in range(256)), *map(str.encode, PIECES), b"<end>"]
END = len(VOCABULARY) - 1
INFO = xgrammar.TokenizerInfo(VOCABULARY, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[END])
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture(scope="module")
def compiler() -> BoundedCompiler:
    return BoundedCompiler(tokenizer_info=INFO)


def grammar_of(compiler: BoundedCompiler, text: str, n_tokens: int) -> CallGrammar:
    compiled = compiler.compile_grammar(text)
    matcher = xgrammar.GrammarMatcher(compiled)
    plain = XGrammarGrammar(matcher, INFO.vocab_size, compiled, None, text, GrammarStats())
    return CallGrammar(plain, compiler.vocabulary, n_tokens)


def _ends(token: int) -> bool:
    return any(char in VOCABULARY[token] for char in b'"}]')


def written(grammar: CallGrammar, n_tokens: int, draw: random.Random) -> str | None:
    """What a model writes that draws its tokens, and never ends by itself; None: it is cut."""
    mask, text = xgrammar.allocate_token_bitmask(1, INFO.vocab_size), b""
    for _ in range(n_tokens):
        grammar.fill_vocab_mask(mask, 0)
        bits = np.unpackbits(mask[0].numpy().view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: INFO.vocab_size])
        assert len(allowed), "a dead end"
        goes_on = [n for n in allowed if n < 128 or 256 <= n < END] or list(allowed)
        # Closing quotes and brackets are drawn last of all.
        token = min((draw.choice(goes_on) for _ in range(3)), key=_ends)
        grammar.accept_token(int(token))
        if grammar.is_terminated():
            return text.decode()
        text += VOCABULARY[token]
    return None


@pytest.mark.parametrize("n_tokens", [48, 100, 512])
def test_a_string_that_goes_on_is_closed_in_time(compiler, n_tokens):
    text = call_grammar((json.dumps({"name": "f", "parameters": CITY}),), "f")
    end = written(grammar_of(compiler, text, n_tokens), n_tokens, random.Random(1))
    assert end is not None and end.endswith('"}}\n</tool_call>')
    # The limit is used, up to what one choice could have made necessary.
    assert len(end) > n_tokens * 0.5


def test_a_limit_below_the_shortest_call_cuts_it(compiler):
    text = call_grammar((json.dumps({"name": "f", "parameters": CITY}),), "f")
    assert written(grammar_of(compiler, text, 8), 8, random.Random(1)) is None


def test_a_grammar_that_is_rolled_back_ends_in_time(compiler):
    text = call_grammar((json.dumps({"name": "f", "parameters": CITY}),), "f")
    grammar = grammar_of(compiler, text, 40)
    for char in '{"city": "abc':
        grammar.accept_token(ord(char))
    grammar.rollback(2)
    end = written(grammar, 40 - 11, random.Random(2))
    assert end is not None and json.loads('{"city": "a' + end.partition("}\n")[0])


NULL = {"type": "null"}
LONG = {
    "string": ({"type": "string"}, 1_000),
    "pattern": ({"type": "string", "pattern": "^[a-z]+$"}, 1_000),
    "array": ({"type": "array", "items": NULL}, 64 * len("null, ")),
    "object": ({"type": "object", "additionalProperties": NULL}, 64 * len('"": null, ')),
    "integer": ({"type": "integer"}, 15),
    "number": ({"type": "number"}, 40),
}


@pytest.mark.parametrize("name", LONG)
def test_what_the_schema_does_not_bound_ends_by_itself(compiler, name):
    schema, most = LONG[name]
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    text = call_grammar((json.dumps({"name": "f", "parameters": parameters}),), "f")
    end = written(grammar_of(compiler, text, 4_000), 4_000, random.Random(4))
    assert end is not None
    # An object's names are strings of their own.
    assert len(end) < most + 100 or name == "object"


@pytest.mark.parametrize("seed", range(40))
def test_a_call_of_a_drawn_schema_ends_and_fits(compiler, seed):
    function, draw = SchemaMaker(seed).function("f"), random.Random(seed)
    try:
        check_enforceable([function], "tool_choice")
    except ParameterError:
        return
    text = call_grammar((json.dumps(function),), "f")
    for n_tokens in (160, 400):
        grammar = grammar_of(compiler, text, n_tokens)
        end = written(grammar, n_tokens, draw)
        if end is None:  # only where the shortest call does not fit
            texts = texts_of(text)
            needed = texts.text_of(texts.start), texts.text_of(texts.longest_detour)
            n_each = (compiler.vocabulary.n_tokens("".join(one)) for one in needed)
            assert n_tokens < sum(n_each) + 4
            continue
        arguments, _, _ = end.partition("}\n</tool_call>")
        call = read_function_call(f'{{"name": "f", "arguments": {arguments}}}', (function,))
        Draft202012Validator(function.get("parameters") or {}).validate(json.loads(call.arguments))
