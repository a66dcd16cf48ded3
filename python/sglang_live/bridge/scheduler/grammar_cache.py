"""Bounds of the caches of compiled grammars: each request may bring another grammar.

The grammar of a large schema takes a few MB with a large vocabulary.
"""

import xgrammar
from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend, BaseGrammarObject

MOST_GRAMMARS = 64
MOST_BYTES = 256 << 20


class BoundedCompiler(xgrammar.GrammarCompiler):
    """A grammar compiler whose cache is limited to MOST_BYTES."""

    def __init__(self, tokenizer_info: xgrammar.TokenizerInfo, *, cache_enabled: bool = True):
        super().__init__(tokenizer_info, cache_enabled=cache_enabled, cache_limit_bytes=MOST_BYTES)


def keep_bounded(
    result: None, backend: BaseGrammarBackend, key: tuple[str, str], value: BaseGrammarObject
) -> None:
    """After BaseGrammarBackend.set_cache: remove the oldest grammars beyond MOST_GRAMMARS.

    Running requests hold copies of theirs.
    """
    while len(backend.cache) > MOST_GRAMMARS:
        del backend.cache[next(iter(backend.cache))]
