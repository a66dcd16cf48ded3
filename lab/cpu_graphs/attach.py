"""Decode graphs in the engines of a machine without a GPU."""

import os
from collections.abc import Iterable
from typing import Any

from lab.upstream.comparison import Upstream, differences
from sglang_live.attachment import ATTACH_ENV
from sglang_live.bridge.platform import cpu
from sglang_live.bridge.platform.int8_weights import wants_int8
from sglang_live.bridge.seams import Seam, put_in_place
from sglang_live.errors import SeamError

# Batch sizes for which decode graphs are captured, separated by commas.
GRAPHS_ENV = "LAB_CPU_GRAPHS"

UPSTREAM = (
    Upstream(
        "sglang.srt.model_executor.cuda_graph_config",
        functions={
            "with_phase": "config, phase, **changes",
        },
    ),
    Upstream(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner",
        functions={
            "__init__": (
                "self, model_runner, *, attn_backend=, speculative_num_steps=, "
                "speculative_num_draft_tokens=, record_nolora_graph="
            ),
            "_record_in_graph_metadata_prep_done": "self",
        },
    ),
    Upstream(
        "sglang.srt.model_executor.runner_backend.base_cuda_graph_backend.BaseCudaGraphBackend",
        functions={
            "capture_session": "self, stream",
            "capture_one": "self, shape_key, forward_fn, capture_inputs=, post_warmup_hook=",
            "can_run": "self, forward_batch, shape_key",
            "replay_session": "self",
            "replay": "self, shape_key, static_forward_batch, **kwargs",
            "cleanup": "self",
        },
    ),
    Upstream(
        "sglang.srt.model_executor.graph_shared_output.GraphSharedOutput",
        functions={
            "__init__": "self, *, device, max_rows",
        },
    ),
    Upstream(
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend",
        functions={
            "_run_sdpa_forward_decode": (
                "self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, "
                "seq_lens, encoder_lens=, scaling=, enable_gqa=, causal=, is_cross_attn=, "
                "sliding_window_size="
            ),
            "init_cuda_graph_state": "self, max_bs, max_num_tokens",
            "get_cuda_graph_seq_len_fill_value": "self",
            "shared_read_ends": "self, fm",
        },
    ),
)


def environment(sizes: Iterable[int]) -> dict[str, str]:
    """sizes: of the batches for which graphs are captured."""
    text = ",".join(map(str, sizes))
    return {ATTACH_ENV: "lab.cpu_graphs.attach:attach", GRAPHS_ENV: text}


def graph_sizes() -> list[int]:
    """Raises ValueError: the variable has another form."""
    text = os.environ[GRAPHS_ENV]
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{GRAPHS_ENV} takes batch sizes as 1,2,4,8, got {text!r}")
    return sorted({int(part) for part in parts})


def attach(place: str) -> None:
    if not cpu.is_active():
        raise ValueError(f"{GRAPHS_ENV} is for machines without a GPU")
    if wants_int8():
        raise ValueError(f"{GRAPHS_ENV}: graphs would keep the weights that int8 replaces")
    if found := [text for names in UPSTREAM for text in differences(names)]:
        raise SeamError("; ".join(found))
    capture_on(cpu.CpuReferencePlatform, graph_sizes())
    if place == "sglang":
        put_in_place(SEAMS)


def capture_on(platform: Any, sizes: list[int]) -> None:
    """Have the platform capture decode graphs of batches of these sizes."""
    from sglang.srt.model_executor.cuda_graph_config import Phase, with_phase
    from sglang.srt.platforms.interface import PlatformCapabilities

    from lab.cpu_graphs.graphs import TapeGraphBackend, TapeGraphRunner

    def set_sizes(_platform: Any, server_args: Any) -> None:
        config = server_args.cuda_graph_config
        server_args.cuda_graph_config = with_phase(config, Phase.DECODE, bs=sizes)

    platform.capabilities = PlatformCapabilities(graph_capture=True)
    platform.get_graph_runner_cls = lambda _platform: TapeGraphRunner
    platform.get_full_graph_backend_cls = lambda _platform: TapeGraphBackend
    platform.apply_server_args_defaults = set_sizes


def _attention(model_runner: Any) -> Any:
    from lab.cpu_graphs.graphs import TapeAttention

    return TapeAttention(model_runner)


SEAMS = [
    Seam(
        name="cpu_graph_attention",
        target="sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS",
        kind="item",
        signature=None,
        hook=("torch_native", _attention),
        why="torch_native attention reads sequence lengths on the host and cannot be captured",
        drop_when="upstream's torch_native attention can be captured",
        stages=("*",),
        cpu_only=True,
    ),
    Seam(
        name="cpu_graph_capture",
        target=(
            "sglang.srt.model_executor.model_runner_components.cuda_graph_setup"
            ".capture_decode_graph"
        ),
        kind="around",
        signature="(*, model_runner: 'ModelRunner') -> 'GraphCapture'",
        hook="lab.cpu_graphs.graphs:capture_decode_graph",
        why="on a CPU upstream captures for torch.compile only, and nothing with torch_native "
        "attention",
        drop_when="upstream captures on every platform whose capabilities include graph_capture",
        stages=("*",),
        cpu_only=True,
    ),
    Seam(
        name="cpu_graph_moe",
        target="sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
        kind="around",
        signature=(
            "(layer: torch.nn.modules.module.Module, x: torch.Tensor, "
            "topk_output: sglang.srt.layers.moe.topk.StandardTopKOutput, "
            "moe_runner_config: sglang.srt.layers.moe.moe_runner.base.MoeRunnerConfig) "
            "-> torch.Tensor"
        ),
        hook="lab.cpu_graphs.graphs:moe_as_one_call",
        why="upstream's reference reads the number of tokens of each expert on the host",
        drop_when="upstream's moe_forward_native can be captured",
        stages=("*",),
        cpu_only=True,
    ),
]
