"""The talker's code predictor: the same codes on the device as on the CPU, and ms per frame.

Random weights: the cost does not depend on them, and agreement is as hard as with trained ones.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmark.gpu.findings import Findings
from benchmark.gpu.measuring import exact_float32, median_ms
from sglang_live.models.speech_lm.code_predictor import CodePredictor
from sglang_live.models.speech_lm.sampler import Sampler, draws_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Sizes of Qwen3-Omni-30B-A3B: transformers' defaults except code_groups.

    code_groups: 16 in the published checkpoint, 32 by default in transformers 5.12.
    """

    hidden: int = 1024
    layers: int = 5
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 3072
    vocab: int = 2048
    code_groups: int = 16
    batches: tuple[int, ...] = (1, 8, 32)
    repeats: int = 20


TINY = Options(
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=64,
    vocab=64,
    code_groups=5,
    batches=(1, 3),
    repeats=1,
)


def run(options: Options, device: str, seed: int) -> Findings:
    place = torch.device(device)
    model = build(options, seed)
    with torch.inference_mode():
        with exact_float32():
            agreement = compare(model, options, place, seed)
        rows = measure(_placed(model, place, torch.bfloat16), options, place)
    problems = []
    if agreement["float32_equal"] < 1.0:
        problems.append(
            f"{1 - agreement['float32_equal']:.2%} of the greedy float32 codes differ from the CPU"
        )
    figures = {"agreement": agreement, "bfloat16_ms_per_frame": rows}
    return Findings(figures, tuple(problems), tuple(_lines(agreement, rows)))


@torch.no_grad()
def build(options: Options, seed: int) -> CodePredictor:
    """A predictor on the CPU in float32, whose layers all pass a signal of unit size."""
    model = CodePredictor(
        {
            "hidden_size": options.hidden,
            "num_hidden_layers": options.layers,
            "num_attention_heads": options.heads,
            "num_key_value_heads": options.kv_heads,
            "head_dim": options.head_dim,
            "intermediate_size": options.intermediate,
            "vocab_size": options.vocab,
            "num_code_groups": options.code_groups,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
        },
        sampler=Sampler(top_k=50, top_p=0.8),
    )
    noise = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            scale = 1.0 if "embedding" in name else weight.shape[-1] ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=noise) * scale)
    model.prepare()
    return model


def compare(
    model: CodePredictor, options: Options, device: torch.device, seed: int
) -> dict[str, float]:
    """Shares of equal greedy codes. A code that differs changes all later ones of its frame."""
    past_hidden, first_embed = _inputs(options, max(options.batches), seed)

    def codes(place: torch.device, dtype: torch.dtype) -> Tensor:
        there = _placed(model, place, dtype)
        inputs = past_hidden.to(place, dtype), first_embed.to(place, dtype)
        return there(*inputs, None, None)[0].cpu()

    cpu = torch.device("cpu")
    exact, rounded = codes(cpu, torch.float32), codes(cpu, torch.bfloat16)
    on_device = codes(device, torch.bfloat16)
    return {
        "float32_equal": _equal(codes(device, torch.float32), exact),
        "bfloat16_equal_to_cpu_bfloat16": _equal(on_device, rounded),
        "bfloat16_equal_to_cpu_float32": _equal(on_device, exact),
        "bfloat16_first_code_equal_to_cpu_float32": _equal(on_device[:, :1], exact[:, :1]),
    }


def measure(model: CodePredictor, options: Options, device: torch.device) -> list[dict[str, Any]]:
    rows = []
    for batch in options.batches:
        inputs = [x.to(device, model.lm_head.dtype) for x in _inputs(options, batch, seed=0)]
        streams = torch.arange(batch, device=device)
        none_greedy = torch.zeros(batch, dtype=torch.bool, device=device)

        def greedy(inputs=inputs) -> Tensor:
            return model(*inputs, None, None)[0]

        def sampled(inputs=inputs, streams=streams, none_greedy=none_greedy) -> Tensor:
            # As in serving: the noise is part of the frame's cost.
            draws = draws_of(streams, streams, model.n_steps)
            return model(*inputs, none_greedy, draws)[0]

        for mode, call in (("greedy", greedy), ("sampled", sampled)):
            row = {"batch": batch, "mode": mode}
            row["eager_ms"] = median_ms(call, device, options.repeats)
            row["graph_ms"] = row["graph_equal_to_eager"] = None
            if device.type == "cuda":
                replay, codes = captured(call)
                row["graph_ms"] = median_ms(replay, device, options.repeats)
                row["graph_equal_to_eager"] = _equal(codes, call())
            rows.append(row)
    return rows


def captured(call: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """The replay of a CUDA graph of the call, and the tensor that each replay fills."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # the first calls allocate, which capture does not allow
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph.replay, result


def _placed(model: CodePredictor, device: torch.device, dtype: torch.dtype) -> CodePredictor:
    placed = copy.deepcopy(model).to(device, dtype)
    placed.prepare()
    return placed


def _inputs(options: Options, n: int, seed: int) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    shape = (2, n, options.hidden)
    past_hidden, first_embed = torch.randn(shape, generator=noise)
    return past_hidden, first_embed


def _equal(codes: Tensor, expected: Tensor) -> float:
    return (codes == expected).double().mean().item()


def _lines(agreement: dict[str, float], rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"{name.replace('_', ' ')}: {share:.2%}" for name, share in agreement.items()]
    lines.append("batch  mode     eager ms/frame  graph ms/frame")
    for row in rows:
        graph = "n/a" if row["graph_ms"] is None else f"{row['graph_ms']:.3f}"
        lines.append(f"{row['batch']:5d}  {row['mode']:7}  {row['eager_ms']:14.3f}  {graph:>14}")
    return lines
