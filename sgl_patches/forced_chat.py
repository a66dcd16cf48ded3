"""A forced function call of SGLang's own chat API ends."""

TARGET = "sglang.srt.entrypoints.openai.protocol.ChatCompletionRequest.to_sampling_params"
KIND = "after"
SIGNATURE = (
    "(self, stop: 'List[str]', model_generation_config: 'Dict[str, Any]', "
    "tool_call_constraint: 'Optional[ToolCallConstraint]' = None, "
    "renderer_handles_response_format: 'bool' = False) -> 'Dict[str, Any]'"
)
WHY = "upstream lets strings, lists of calls and white space go on until the context is full"
DROP_WHEN = "upstream bounds what a call may hold"
STAGES = ("thinker",)
CPU_ONLY = False
HOOK = "sglang_live.bridge.grammars.forced_chat:bound_calls"
