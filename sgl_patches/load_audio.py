"""Decode request audio within bounds, with the decoder that all other paths use."""

TARGET = "sglang.srt.utils.common.load_audio"
KIND = "replace"
SIGNATURE = (
    "(audio_file: 'Union[str, bytes]', sr: 'Optional[int]' = None, mono: 'bool' = True)"
    " -> 'np.ndarray'"
)
WHY = "upstream decodes without bounds (1 KB at 1 Hz becomes 32 MB) and needs torchaudio on CPU"
DROP_WHEN = "upstream bounds what it decodes, and decodes without torchaudio"
STAGES = ("*",)
CPU_ONLY = False
HOOK = "sglang_live.bridge.platform.audio_input:load_audio"
