"""The published Silero network as a graph over windows of many users at once.

In: the ONNX file of the silero-vad package. Out: an ONNX model with the same weights.

As published, each convolution of a window multiplies by a matrix of at most four columns, so that
a megabyte of weights passes the caches for every window. Here the windows of all users are rows of
one product, and the recurrent layer does one step of all users at a time. That takes half the time
(`python -m benchmark.speech_scoring`).
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from sglang_live.models.onnx_graph import Graph, ints

# The short-time Fourier transform that the network begins with.
_FFT, _HOP = 256, 128
_N_BINS = _FFT // 2 + 1
_STRIDES = (1, 2, 2, 1)  # of the four convolutions over its frames
_WIDTH = 128


def for_many_users(path: Path, window_samples: int, context_samples: int) -> bytes:
    """Build the model.

    Inputs: `windows` [n, context_samples + window_samples]; `at` [steps, users], the index of a
    user's window at each step, arbitrary beyond the user's last; `lengths` [users] int32, number
    of windows of each user; `h` and `c` [1, users, 128].
    Outputs: `speech` [steps, users], `hn` and `cn` as h and c.
    """
    weights = _weights(path)
    graph = Graph()
    n_frames = window_samples // _HOP
    x = graph.add("Pad", "windows", ints([0, 0, 0, context_samples]), mode="reflect")
    x = graph.add("Reshape", x, ints([-1, n_frames + 1, _HOP]))
    x = graph.add("Concat", *_shifted(graph, x, n_frames, _FFT // _HOP), axis=2)
    x = graph.add("MatMul", x, weights["stft.forward_basis_buffer"][:, 0].T)
    x = graph.add("Mul", x, x)
    parts = (graph.part(x, axis=2, begin=at, end=at + _N_BINS) for at in (0, _N_BINS))
    x = graph.add("Sqrt", graph.add("Add", *parts))
    for i, stride in enumerate(_STRIDES):
        weight, bias = weights[f"encoder.{i}.weight"], weights[f"encoder.{i}.bias"]
        x = graph.add("Pad", x, ints([0, 1, 0, 0, 1, 0]))
        x = graph.add("Concat", *_shifted(graph, x, n_frames, weight.shape[2], stride), axis=2)
        x = graph.add("MatMul", x, weight.transpose(2, 1, 0).reshape(-1, len(bias)))
        x = graph.add("Relu", graph.add("Add", x, bias))
        n_frames = -(-n_frames // stride)
    x = graph.add("Gather", graph.add("Reshape", x, ints([-1, _WIDTH])), "at")
    lstm = [weights[f"lstm.{name}"] for name in "wrb"]
    x = graph.add("LSTM", x, *lstm, "lengths", "h", "c", more=("hn", "cn"), hidden_size=_WIDTH)
    x = graph.add("Relu", graph.add("Squeeze", x, ints([1])))
    x = graph.add("MatMul", x, weights["output.weight"][0])
    x = graph.add("Sigmoid", graph.add("Add", x, weights["output.bias"]))
    graph.add("Squeeze", x, ints([2]), name="speech")
    return graph.model(
        "silero",
        inputs={
            "windows": (TensorProto.FLOAT, ("n", context_samples + window_samples)),
            "at": (TensorProto.INT64, ("steps", "users")),
            "lengths": (TensorProto.INT32, ("users",)),
            "h": (TensorProto.FLOAT, (1, "users", _WIDTH)),
            "c": (TensorProto.FLOAT, (1, "users", _WIDTH)),
        },
        outputs={
            "speech": (TensorProto.FLOAT, ("steps", "users")),
            "hn": (TensorProto.FLOAT, (1, "users", _WIDTH)),
            "cn": (TensorProto.FLOAT, (1, "users", _WIDTH)),
        },
    )


def _shifted(graph: Graph, x: str, n: int, times: int, step: int = 1) -> list[str]:
    """Slices of every step-th of n frames; slice i starts at frame i."""
    return [graph.part(x, axis=1, begin=i, end=i + n, step=step) for i in range(times)]


def _weights(path: Path) -> dict[str, np.ndarray]:
    """Weights by their names in the file; of the recurrent layer as lstm.w, lstm.r, lstm.b."""
    graph = onnx.load(str(path)).graph
    named = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    (lstm,) = (node for node in graph.node if node.op_type == "LSTM")
    named |= {f"lstm.{key}": named[name] for key, name in zip("wrb", lstm.input[1:4], strict=True)}
    return named
