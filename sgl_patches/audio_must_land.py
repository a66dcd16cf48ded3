"""Refuse a request whose audio would be dropped before it reaches the model."""

TARGET = "sglang.srt.multimodal.processors.qwen_vl.QwenVLImageProcessor.process_mm_data_async"
KIND = "around"
SIGNATURE = "(self, image_data: List[Union[str, bytes]], input_text, request_obj, *args, **kwargs)"
WHY = "with a prompt without placeholders (a text-only chat template) upstream drops the audio"
DROP_WHEN = "upstream raises when audio items and placeholders do not match"
STAGES = ("thinker",)
CPU_ONLY = False
HOOK = "sglang_live.bridge.platform.audio_input:check_audio_landed"
