"""Decode and prefill graphs in the engines of a machine without a GPU."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

from lab.upstream.comparison import Upstream, differences
from sglang_live.attachment import ATTACH_ENV
from sglang_live.bridge.platform import cpu
from sglang_live.bridge.platform.int8_weights import wants_int8
from sglang_live.bridge.seams import Seam, put_in_place
from sglang_live.errors import SeamError

# Batch sizes for which decode graphs are captured, separated by commas.
GRAPHS_ENV = "LAB_CPU_GRAPHS"
# Numbers of tokens for which prefill graphs are captured, in the same form; unset: none.
PREFILL_ENV = "LAB_CPU_PREFILL_GRAPHS"

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
        "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner",
        functions={"_capture": "self", "_capture_one_stream": "self"},
    ),
    Upstream(
        "sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend"
        ".BreakableCudaGraphBackend",
        functions={
            "__init__": "self, cuda_graph_runner, *, enable_memory_saver=, debug_eager=",
            "replay_session": "self",
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


def environment(sizes: Iterable[int], prefill: Iterable[int] = ()) -> dict[str, str]:
    """
    Args:
        sizes: of the batches for which decode graphs are captured.
        prefill: numbers of tokens for which prefill graphs are.
    """
    found = {
        ATTACH_ENV: "lab.cpu_graphs.attach:attach",
        GRAPHS_ENV: ",".join(map(str, sizes)),
        PREFILL_ENV: ",".join(map(str, prefill)),
    }
    return {name: text for name, text in found.items() if text}


def graph_sizes(variable: str = GRAPHS_ENV) -> list[int]:
    """Raises ValueError: the variable has another form."""
    text = os.environ[variable]
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{variable} takes sizes as 1,2,4,8, got {text!r}")
    return sorted({int(part) for part in parts})


def attach(place: str) -> None:
    if not cpu.is_active():
        raise ValueError(f"{GRAPHS_ENV} is for machines without a GPU")
    if wants_int8():
        raise ValueError(f"{GRAPHS_ENV}: graphs would keep the weights that int8 replaces")
    if found := [text for names in UPSTREAM for text in differences(names)]:
        raise SeamError("; ".join(found))
    prefill = graph_sizes(PREFILL_ENV) if PREFILL_ENV in os.environ else []
    capture_on(cpu.CpuReferencePlatform, graph_sizes(), prefill)
    if place == "sglang":
        put_in_place(SEAMS + (PREFILL_SEAMS if prefill else []))


def capture_on(platform: Any, sizes: list[int], prefill: Sequence[int] = ()) -> None:
    """Have the platform capture graphs of decodes and prefills of these sizes."""
    from sglang.srt.model_executor.cuda_graph_config import Phase, with_phase
    from sglang.srt.platforms.interface import PlatformCapabilities

    from lab.cpu_graphs.graphs import TapeGraphBackend, TapeGraphRunner

    def set_sizes(_platform: Any, server_args: Any) -> None:
        config = with_phase(server_args.cuda_graph_config, Phase.DECODE, bs=sizes)
        if prefill:
            config = with_phase(config, Phase.PREFILL, bs=list(prefill))
        server_args.cuda_graph_config = config

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

PREFILL_SEAMS = [
    Seam(
        name="cpu_prefill_graph",
        target=(
            "sglang.srt.model_executor.model_runner_components.cuda_graph_setup"
            ".capture_prefill_graph"
        ),
        kind="around",
        signature=(
            "(*, model_runner: 'ModelRunner', eager_runner: 'EagerRunner', "
            "force_for_draft_worker: 'bool' = False) -> 'GraphCapture'"
        ),
        hook="lab.cpu_graphs.prefill:capture_prefill_graph",
        why="upstream switches graphs off with torch_native attention",
        drop_when="upstream's torch_native attention can be captured",
        stages=("*",),
        cpu_only=True,
    ),
    Seam(
        name="cpu_prefill_capture",
        target=(
            "sglang.srt.model_executor.runner.prefill_cuda_graph_runner"
            ".PrefillCudaGraphRunner._capture"
        ),
        kind="replace",
        signature="(self) -> 'None'",
        hook="lab.cpu_graphs.prefill:capture",
        why="upstream captures on a stream of the GPU",
        drop_when="upstream captures prefills on every platform",
        stages=("*",),
        cpu_only=True,
    ),
    Seam(
        name="cpu_prefill_backend",
        target=(
            "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.resolve_prefill_backend"
        ),
        kind="define",
        signature=None,
        hook="lab.cpu_graphs.prefill:TapePrefillBackend",
        why="upstream has no backend without CUDA's graphs",
        drop_when="a platform can name its backend for prefills, as it can for decodes",
        stages=("*",),
        cpu_only=True,
    ),
    Seam(
        name="cpu_prefill_attention",
        target="sglang.srt.layers.radix_attention.RadixAttention._eager_attention",
        kind="define",
        signature=None,
        hook="lab.cpu_graphs.prefill:attention_as_one_call",
        why="it runs between the segments of a graph, which a tape has as one call",
        drop_when="upstream captures prefills on every platform",
        stages=("*",),
        cpu_only=True,
    ),
]
