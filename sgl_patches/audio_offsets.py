"""Find audio placeholders also in a prompt that begins and ends with one."""

TARGET = (
    "sglang.srt.multimodal.processors.base_processor.BaseMultimodalProcessor.get_mm_items_offset"
)
KIND = "replace"
SIGNATURE = "(input_ids: torch.Tensor, mm_token_id: int) -> List[Tuple[int, int]]"
WHY = "upstream uses torch.roll, which wraps: a prompt that begins and ends with audio loses it"
DROP_WHEN = "get_mm_items_offset no longer wraps around"
STAGES = ("thinker",)
CPU_ONLY = False
HOOK = "sglang_live.bridge.platform.audio_input:placeholder_spans"
