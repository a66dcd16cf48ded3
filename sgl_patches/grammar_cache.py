"""A bound of SGLang's cache of compiled grammars: each request may bring another grammar."""

TARGET = "sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend.set_cache"
KIND = "after"
SIGNATURE = (
    "(self, key: Tuple[str, str], "
    "value: sglang.srt.constrained.base_grammar_backend.BaseGrammarObject)"
)
WHY = "upstream keeps every compiled grammar: clients could fill the memory with them"
DROP_WHEN = "upstream bounds its cache of grammars"
STAGES = ("thinker",)
CPU_ONLY = False
HOOK = "sglang_live.bridge.grammars.grammar_cache:keep_bounded"
