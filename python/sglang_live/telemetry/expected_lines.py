"""Warnings of libraries that say nothing about this server, and are not written.

SGLang imports its code for all models and platforms, and tells what of it cannot run here. Each is
named by its logger and its whole text: whatever else these loggers write remains.
"""

import logging
import os
import re
import warnings

# Models that need a GPU, or a package that no other does.
_NO_IMPORT = (
    r"Ignore import error when loading sglang\.srt\.(models|multimodal\.processors)\."
    "(falcon_mamba|inkling|mamba|midashenglm): "
    "(No module named .*|cannot import name 'causal_conv1d_fn' .*)"
)
# By logger: messages, each with why it means nothing.
_LINES = {
    # The server raises the limit itself, and warns if that is too low (open_files.py).
    "sglang.srt.utils.common": (
        "Fail to set RLIMIT_NOFILE: current limit exceeds maximum limit",
        # transformers 5 names all tokenizers so.
        "Processor tokenizer for .* is TokenizersBackend, reloading via get_tokenizer",
    ),
    # Without a GPU there are no graphs, and attention is that of PyTorch.
    "sglang.srt.arg_groups.attention_hook": (
        "Cuda graph is disabled because of using torch native attention backend",
    ),
    "sglang.kernels.jit.utils.arch": (r"Cannot detect CUDA architecture\.",),
    "sglang.srt.distributed.bootstrap": (
        "init_cpu_threads_env and shared memory based AllReduce is disabled, .*",
    ),
    # A talker writes no text.
    "sglang.srt.parser.template_manager": ("No HuggingFace chat template found",),
    "sglang.srt.managers.multimodal_processor": (_NO_IMPORT,),
    "sglang.srt.models.registry": (_NO_IMPORT,),
    "sglang.utils": (
        "torchcodec is unavailable; video audio-track detection and .*",
        "torchaudio is not installed; audio inputs will fail at request time",
    ),
    # Routes of SGLang that the gateway does not offer.
    "sglang.srt.entrypoints.openai.serving_rerank": ("Using fallback token IDs for yes/no .*",),
    "sglang.srt.entrypoints.http_server": (
        r"OpenAI Responses API \(/v1/responses\) disabled: .*openai_harmony.*",
    ),
    # M-RoPE, which SGLang computes itself.
    "transformers.modeling_rope_utils": (
        r"Unrecognized keys in `rope_parameters` for 'rope_type'='default': "
        r"\{'mrope_\w+', 'mrope_\w+'\}",
    ),
}
_WARNINGS = (
    "Only CUDA, HIP and XPU support AWQ currently",
    "Only CUDA, MUSA and NPU support GGUF quantization currently",
    "Triton is not supported on current platform, roll back to CPU",
    # By weights in 8 bits, with the pinned PyTorch.
    "torch.quantize_per_tensor, torch.quantize_per_channel and other quantized tensor creation",
)


class _Unexpected(logging.Filter):
    def __init__(self, *patterns: str):
        super().__init__()
        self._expected = re.compile("|".join(patterns), re.DOTALL)

    def filter(self, record: logging.LogRecord) -> bool:
        return not self._expected.fullmatch(record.getMessage())


_FILTERS = {name: _Unexpected(*patterns) for name, patterns in _LINES.items()}


def forgo_expected_lines() -> None:
    """In this process, and in those that it forks."""
    for name, unexpected in _FILTERS.items():
        logging.getLogger(name).addFilter(unexpected)  # once, however often it is called
    for text in _WARNINGS:
        warnings.filterwarnings("ignore", message=re.escape(text))
    # A bar for weights that take longer: a small model is there before it could be read.
    os.environ.setdefault("TQDM_DELAY", "5")
