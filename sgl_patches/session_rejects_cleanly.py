"""A turn refused because another is running must not clear that one's claim on the session."""

TARGET = "sglang.srt.session.session_controller.Session.create_req"
KIND = "after"
SIGNATURE = (
    "(self, req: 'TokenizedGenerateReqInput', tokenizer, vocab_size: 'int', eos_token_ids=None, "
    "disagg_mode: 'Optional[DisaggregationMode]' = None)"
)
WHY = "a third turn is then admitted beside the first: context is lost, and the pool check exits"
DROP_WHEN = "sgl-project/sglang#36475 is fixed in the pinned version"
STAGES = ("thinker",)
CPU_ONLY = False
HOOK = "sglang_live.bridge.session.truncate:detach_rejected"
