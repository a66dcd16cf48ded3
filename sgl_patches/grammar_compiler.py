"""A bound of xgrammar's own cache of compiled grammars."""

TARGET = "sglang.srt.constrained.xgrammar_backend.GrammarCompiler"
KIND = "replace"
SIGNATURE = (
    "(tokenizer_info: xgrammar.tokenizer_info.TokenizerInfo, *, max_threads: int = 8, "
    "cache_enabled: bool = True, cache_limit_bytes: int = -1)"
)
WHY = "upstream sets no bound, and clearing the cache keeps the rules of all grammars"
DROP_WHEN = "upstream passes cache_limit_bytes"
STAGES = ("thinker",)
CPU_ONLY = False
HOOK = "sglang_live.bridge.grammars.grammar_cache:BoundedCompiler"
