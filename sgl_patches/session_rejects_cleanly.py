"""A request rejected because another one runs must not clear that one's flag in the session."""

TARGET = "sglang.srt.session.session_controller.Session.create_req"
KIND = "after"
SIGNATURE = (
    "(self, req: 'TokenizedGenerateReqInput', tokenizer, vocab_size: 'int', eos_token_ids=None, "
    "disagg_mode: 'Optional[DisaggregationMode]' = None, "
    "req_factory: 'Callable[..., Req]' = <class 'sglang.srt.managers.schedule_batch.Req'>)"
)
WHY = "a third request is then admitted beside the first: KV is lost, and the pool check exits"
DROP_WHEN = "sgl-project/sglang#36475 is fixed in the pinned version"
STAGES = ("thinker",)
CPU_ONLY = False
HOOK = "sglang_live.bridge.cache.truncate:detach_rejected"
