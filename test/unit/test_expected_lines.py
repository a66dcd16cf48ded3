"""Warnings of libraries that are not written: those on the list, and no other."""

import logging
import warnings

import pytest

from sglang_live.ids import is_logged
from sglang_live.telemetry.expected_lines import forgo_expected_lines

EXPECTED = [
    ("sglang.srt.utils.common", "Fail to set RLIMIT_NOFILE: current limit exceeds maximum limit"),
    ("sglang.kernels.jit.utils.arch", "Cannot detect CUDA architecture."),
    (
        "sglang.srt.managers.multimodal_processor",
        "Ignore import error when loading sglang.srt.multimodal.processors.inkling: "
        "No module named 'cutlass'",
    ),
    (
        "sglang.srt.models.registry",
        "Ignore import error when loading sglang.srt.models.falcon_mamba: cannot import name "
        "'causal_conv1d_fn' from 'sglang.srt.layers.attention.mamba.mamba' (/x/mamba.py)",
    ),
    (
        "transformers.modeling_rope_utils",
        "Unrecognized keys in `rope_parameters` for 'rope_type'='default': "
        "{'mrope_section', 'mrope_interleaved'}",
    ),
]
NEWS = [
    ("sglang.srt.utils.common", "Fail to set RLIMIT_STACK: current limit exceeds maximum limit"),
    ("sglang.srt.utils.common", "Cannot detect CUDA architecture."),
    (
        "sglang.srt.managers.multimodal_processor",
        "Ignore import error when loading sglang.srt.multimodal.processors.qwen3_omni: "
        "No module named 'librosa'",
    ),
    (
        "transformers.modeling_rope_utils",
        "Unrecognized keys in `rope_parameters` for 'rope_type'='yarn': {'factr'}",
    ),
]


@pytest.mark.parametrize(
    ("name", "text", "is_written"),
    [*((*one, False) for one in EXPECTED), *((*one, True) for one in NEWS)],
)
def test_a_line_is_left_out_by_its_logger_and_its_whole_text(name, text, is_written):
    forgo_expected_lines()
    logger, seen = logging.getLogger(name), []
    handler = logging.Handler()
    handler.emit = seen.append
    logger.addHandler(handler)
    try:
        logger.warning("%s", text)
    finally:
        logger.removeHandler(handler)
    assert bool(seen) == is_written


def test_a_warning_is_left_out_by_its_text():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        forgo_expected_lines()
        warnings.warn("Only CUDA, HIP and XPU support AWQ currently.", stacklevel=1)
        warnings.warn("The checkpoint is broken.", stacklevel=1)
    assert [str(one.message) for one in seen] == ["The checkpoint is broken."]


def test_requests_of_a_warm_up_have_no_lines():
    assert is_logged("think-session-7-0000000001")
    assert not is_logged("think-warm-up-0000000003") and not is_logged("speak-warm-up-01")
