"""Arms of a check of an engine: where it runs, with which arithmetic, with or without graphs."""

from collections.abc import Mapping
from typing import Any

import numpy as np

_POOL = {"max_total_tokens": 16_384}
# SGLang's default attention backends on CUDA take half precision, or round float32 to TF32.
_EXACT = {"dtype": "float32", "attention_backend": "torch_native", "disable_cuda_graph": True}
_EAGER = {"dtype": "bfloat16", "disable_cuda_graph": True}
_SERVED = {"dtype": "bfloat16"}
# The arms in bf16, each beside the one whose arithmetic it should have.
_GRAPHS = {"bfloat16": "bfloat16_eager", "bfloat16_prefill_graphs": "bfloat16"}

Arms = dict[str, tuple[str, dict[str, Any]]]
# Less is not rounding: two lines of equal arithmetic begin alike.
MIN_GRAPH_EQUAL = 0.5


def arms_on(device: str) -> Arms:
    """Device and engine arguments by name; "cpu" is the reference, in float32."""
    on_cpu = ("cpu", _POOL)
    if device == "cpu":
        return {"cpu": on_cpu, "float32": on_cpu}
    return {
        "cpu": on_cpu,
        "float32": (device, _POOL | _EXACT),
        "bfloat16_eager": (device, _POOL | _EAGER),
        "bfloat16": (device, _POOL | _SERVED),
        "bfloat16_prefill_graphs": (
            device,
            _POOL | _SERVED | {"cuda_graph_backend_prefill": "breakable"},
        ),
    }


def equal_share(found: np.ndarray, expected: np.ndarray) -> float:
    """Share of equal rows. Each: [n, n_codes], or [n] tokens."""
    equal = found == expected
    return float((equal.all(axis=1) if equal.ndim > 1 else equal).mean())


def compare(outputs: Mapping[str, np.ndarray], what: str) -> tuple[dict[str, Any], list[str]]:
    """
    Args:
        outputs: of every arm, as for equal_share.
        what: of which the outputs are: "frames".
    Returns:
        Figures and problems.
    """
    expected = outputs["cpu"]
    equal = {name: equal_share(found, expected) for name, found in outputs.items() if name != "cpu"}
    figures: dict[str, Any] = {f"{what}_equal_to_cpu_float32": equal}
    problems = []
    if equal["float32"] < 1.0:
        problems.append(f"{1 - equal['float32']:.2%} of the float32 {what} differ")
    figures["graph_equal_to_eager"] = {
        name: equal_share(outputs[name], outputs[eager])
        for name, eager in _GRAPHS.items()
        if name in outputs
    }
    problems += [
        f"{1 - share:.2%} of the {what} differ between graph and eager: {name}"
        for name, share in figures["graph_equal_to_eager"].items()
        if share < MIN_GRAPH_EQUAL
    ]
    return figures, problems


def lines_of(figures: Mapping[str, Any], what: str) -> list[str]:
    lines = [
        f"{name} {what} equal to the CPU's: {share:.2%}"
        for name, share in figures[f"{what}_equal_to_cpu_float32"].items()
    ]
    return lines + [
        f"{name}, graph equal to eager: {share:.2%}"
        for name, share in figures["graph_equal_to_eager"].items()
    ]
