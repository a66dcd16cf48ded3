"""Bounds of the caches of compiled grammars: each request may bring another grammar.

The grammar of a large schema takes a few MB with a large vocabulary.
"""

from functools import cached_property
from typing import Any

import xgrammar
from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend, BaseGrammarObject

from sglang_live.bridge.grammars.call_end import Vocabulary, texts_of
from sglang_live.models.grammars.call_grammar import MARK

MOST_GRAMMARS = 64
MOST_BYTES = 256 << 20


class BoundedCompiler(xgrammar.GrammarCompiler):
    """A grammar compiler whose cache is limited to MOST_BYTES. What ends a function call in time is
    made here too: SGLang compiles beside its scheduler's loop."""

    def __init__(self, tokenizer_info: xgrammar.TokenizerInfo, *, cache_enabled: bool = True):
        super().__init__(tokenizer_info, cache_enabled=cache_enabled, cache_limit_bytes=MOST_BYTES)
        self._info = tokenizer_info

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self._info)

    def compile_grammar(  # type: ignore[override] # one of its two forms
        self, grammar: str, **options: Any
    ) -> xgrammar.CompiledGrammar:
        compiled = super().compile_grammar(grammar, **options)
        if grammar.startswith(MARK):
            texts_of(grammar), self.vocabulary.ids
        return compiled


def keep_bounded(
    result: None, backend: BaseGrammarBackend, key: tuple[str, str], value: BaseGrammarObject
) -> None:
    """After BaseGrammarBackend.set_cache: remove the oldest grammars beyond MOST_GRAMMARS.

    Running requests hold copies of theirs.
    """
    while len(backend.cache) > MOST_GRAMMARS:
        del backend.cache[next(iter(backend.cache))]
