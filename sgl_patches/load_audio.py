"""Decode request audio with soundfile and soxr instead of torchaudio or torchcodec."""

TARGET = "sglang.srt.utils.common.load_audio"
KIND = "replace"
SIGNATURE = (
    "(audio_file: 'Union[str, bytes]', sr: 'Optional[int]' = None, mono: 'bool' = True)"
    " -> 'np.ndarray'"
)
WHY = "upstream imports torchaudio even for audio at the right rate; no build of it loads on CPU"
DROP_WHEN = "upstream decodes wav and flac without torchaudio"
STAGES = ("*",)
CPU_ONLY = True
HOOK = "sglang_live.bridge.audio_input:load_audio"
