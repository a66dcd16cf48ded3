"""Caches of compiled grammars are bounded, however many grammars clients send."""

import json

import xgrammar
from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend, InvalidGrammarObject

from sglang_live.bridge.grammars import grammar_cache
from sglang_live.bridge.grammars.grammar_cache import MOST_GRAMMARS, BoundedCompiler, keep_bounded

VOCABULARY = xgrammar.TokenizerInfo([chr(code) for code in range(32, 127)])


def test_sglang_keeps_the_latest_grammars():
    backend = BaseGrammarBackend()
    for n in range(1000):
        key, grammar = ("json", str(n)), InvalidGrammarObject()
        backend.set_cache(key, grammar)
        keep_bounded(None, backend, key, grammar)
    assert list(backend.cache) == [("json", str(n)) for n in range(1000 - MOST_GRAMMARS, 1000)]


def test_the_compilers_cache_is_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(grammar_cache, "MOST_BYTES", 100_000)
    compiler = BoundedCompiler(tokenizer_info=VOCABULARY)
    for n in range(100):
        schema = {"type": "object", "properties": {f"p{n}": {"type": "string"}}}
        compiler.compile_json_schema(json.dumps(schema))
    # Without a limit it is 674,000.
    assert 20_000 < compiler.get_cache_size_bytes() < 150_000


def test_sglang_may_turn_the_compilers_cache_off():
    compiler = BoundedCompiler(tokenizer_info=VOCABULARY, cache_enabled=False)
    compiler.compile_json_schema('{"type": "object"}')
    assert compiler.get_cache_size_bytes() == 0
