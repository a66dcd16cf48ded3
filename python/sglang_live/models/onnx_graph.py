"""ONNX models that are built here from published weights.

In: operators with their constants, in order. Out: a serialized model.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_OPSET, _IR_VERSION = 17, 8  # old enough for every onnxruntime

# Element type and shape of an input or output; a named dimension is variable.
Form = tuple[int, tuple[int | str, ...]]


def ints(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)


class Graph:
    """Nodes in order, each with the constants it needs."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[TensorProto] = []

    def add(
        self,
        op: str,
        *inputs: str | np.ndarray,
        name: str = "",
        more: Sequence[str] = (),
        **attributes: Any,
    ) -> str:
        """Add a node.

        Args:
            inputs: names of outputs, or constants.
            name: of the first output; "": chosen here. more: names of its other outputs.
        Returns:
            The name of the first output.
        """
        name = name or f"{op}_{len(self._nodes)}"
        named = [self._named(each) for each in inputs]
        self._nodes.append(helper.make_node(op, named, [name, *more], **attributes))
        return name

    def part(self, x: str, *, axis: int, begin: int, end: int, step: int = 1) -> str:
        return self.add("Slice", x, *(ints([n]) for n in (begin, end, axis, step)))

    def model(self, name: str, inputs: dict[str, Form], outputs: dict[str, Form]) -> bytes:
        infos = [
            [helper.make_tensor_value_info(name, *form) for name, form in forms.items()]
            for forms in (inputs, outputs)
        ]
        graph = helper.make_graph(self._nodes, name, *infos, self._constants)
        opset = [helper.make_opsetid("", _OPSET)]
        model = helper.make_model(graph, opset_imports=opset, ir_version=_IR_VERSION)
        serialized: bytes = model.SerializeToString()
        return serialized

    def _named(self, each: str | np.ndarray) -> str:
        if isinstance(each, str):
            return each
        name = f"constant_{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(np.ascontiguousarray(each), name))
        return name
