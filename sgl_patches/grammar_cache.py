"""Compiled grammars are kept up to a limit: each request may bring another one."""

TARGET = "sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend.set_cache"
KIND = "after"
SIGNATURE = (
    "(self, key: Tuple[str, str], "
    "value: sglang.srt.constrained.base_grammar_backend.BaseGrammarObject)"
)
WHY = "upstream keeps every grammar that was ever compiled: callers could fill the memory with them"
DROP_WHEN = "upstream bounds its cache of grammars"
STAGES = ("thinker",)
CPU_ONLY = False
HOOK = "sglang_live.bridge.scheduler.grammar_cache:keep_bounded"
