"""A batch with a name that is running is refused as a whole, and leaves no state."""

TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager._init_req_state"
KIND = "around"
SIGNATURE = (
    "(self, obj: 'Union[GenerateReqInput, EmbeddingReqInput]', "
    "request: 'Optional[fastapi.Request]' = None)"
)
WHY = "upstream keeps the states of the names before it for good: the engine then seems to be stuck"
DROP_WHEN = "upstream looks at all names of a batch before it makes the first state"
STAGES = ("thinker",)
CPU_ONLY = False
HOOK = "sglang_live.bridge.scheduler.request_states:all_or_none"
