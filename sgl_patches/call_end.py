"""A forced function call ends within the response's tokens."""

TARGET = "sglang.srt.constrained.grammar_manager.GrammarManager._apply_request_reasoning_config"
KIND = "after"
SIGNATURE = "(self, req: 'Req') -> 'None'"
WHY = "upstream cuts a response at its limit, in the middle of its JSON"
DROP_WHEN = "upstream closes a grammar before the limit"
STAGES = ("thinker",)
CPU_ONLY = False
HOOK = "sglang_live.bridge.grammars.call_end:limit"
