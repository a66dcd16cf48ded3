"""A batch with an id that is in use is refused as a whole, and leaves no state."""

TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager._init_req_state"
KIND = "around"
SIGNATURE = (
    "(self, obj: 'Union[GenerateReqInput, EmbeddingReqInput]', "
    "request: 'Optional[fastapi.Request]' = None)"
)
WHY = "upstream keeps the states of the ids before it: the engine then seems to hang"
DROP_WHEN = "upstream checks all ids of a batch before it creates the first state"
STAGES = ("thinker",)
CPU_ONLY = False
HOOK = "sglang_live.bridge.scheduler.request_states:all_or_none"
