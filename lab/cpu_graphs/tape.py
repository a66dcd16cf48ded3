"""Recorded tensor operations that are replayed without the Python that issued them.

A `Tape` has the semantics of a CUDA graph, on any device. Recording runs a function once and keeps
each operator call with its tensors. A replay makes the same calls on the same tensors: a value
that was computed in Python, a branch that was taken and an attribute that was set stay as they
were, and a result has the address that it had at the recording. What CUDA refuses while it
captures is refused here: reading a tensor on the host, and shapes that depend on data. CUDA frees
and reuses memory inside a graph; a tape keeps all of it, so no result of a graph is ever stale
memory of another one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_READS_DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
# Reads that torch does not tag as such.
_UNTAGGED_READS = ("aten::is_nonzero", "aten::item")
# Tagged because an index may be a mask. Indices that are integers have a shape of their own.
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
_ALLOCATIONS = (
    *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"),
    *("aten::new_empty_strided", "aten::empty_permuted"),
)
# Python methods that read a CPU tensor without an operator.
_HOST_METHODS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
_COPIES_FROM_HOST = (torch.tensor, torch.as_tensor)


class CaptureError(RuntimeError):
    """A recorded function does what a captured graph cannot do."""


@dataclass(frozen=True, slots=True)
class _Call:
    """
    written: (index of a result, the tensor that it had at the recording) of each result that has
        memory of its own.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: tuple[tuple[int, Tensor], ...]


class Tape:
    def __init__(self) -> None:
        self._calls: list[_Call] = []

    def __len__(self) -> int:
        return len(self._calls)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the operators of the block, which also run once.

        Raises:
            CaptureError: from inside the block, where it reads data on the host.
        """
        with torch.inference_mode(), _HostMethods(), _Recorder(self):
            yield

    @torch.inference_mode()
    def replay(self) -> None:
        for call in self._calls:
            results = _flat(call.function(*call.args, **call.kwargs))
            for index, tensor in call.written:
                tensor.copy_(results[index])

    def add(self, function: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> None:
        """Keep a call unless a replay of it would change nothing, as with a view."""
        given = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        written = tuple(
            (index, tensor)
            for index, tensor in enumerate(_flat(out))
            if isinstance(tensor, Tensor) and tensor.numel() and _storage(tensor) not in given
        )
        schema = getattr(function, "_schema", None)
        if schema is not None and schema.name in _ALLOCATIONS:
            return
        if schema is not None and not written and not schema.is_mutable:
            return
        self._calls.append(_Call(function, args, kwargs, written))


def as_one_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function`; while a tape records, keep the call as one entry of the tape.

    It has the part of a kernel launch: its pointers are fixed, and it reads what they point at
    when it runs. So it may read tensors on the host in order to do the work of a kernel, provided
    that its arguments and the shape of its result depend on no data.
    """
    recorder = _Recorder.current
    if recorder is None:
        return function(*args, **kwargs)
    with recorder.paused():
        out = function(*args, **kwargs)
    recorder.tape.add(function, args, kwargs, out)
    return out


class _Recorder(TorchDispatchMode):
    current: "_Recorder | None" = None

    def __init__(self, tape: Tape):
        super().__init__()
        self.tape = tape
        self._is_paused = False
        self._depth = 0

    def __enter__(self) -> "_Recorder":
        _Recorder.current = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._depth == 0:
            _Recorder.current = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        before = self._is_paused
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return function(*args, **kwargs)
        _check_operator(function, args, kwargs)
        out = self._run(function, args, kwargs)
        if self._depth == 0:
            self.tape.add(function, args, kwargs, out)
        return out

    def _run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator. One that is made of others is recorded as a whole, because a
        decomposed one may use other kernels, but those others are checked.
        """
        if not torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), _COMPOSITE):
            return function(*args, **kwargs)
        self._depth += 1
        try:
            with self:
                return function.decompose(*args, **kwargs)
        finally:
            self._depth -= 1


class _HostMethods(TorchFunctionMode):
    """Refuses Python methods that copy between a tensor and the host, as CUDA's capture does."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        recorder = _Recorder.current
        if recorder is None or not recorder._is_paused:
            if function in _HOST_METHODS:
                raise CaptureError(_refusal(f"Tensor.{function.__name__}()"))
            if function in _COPIES_FROM_HOST and kwargs.get("device") is not None:
                raise CaptureError(
                    f"torch.{function.__name__}(…, device=…) copies from the host; "
                    "preallocate the tensor outside the graph"
                )
            if function is torch.Tensor.__setitem__ and _copies_number(*args):
                raise CaptureError(
                    "a number assigned to single places is copied from pageable memory; "
                    "assign a tensor of the device, or fill_ the places"
                )
        return function(*args, **kwargs)


def _copies_number(target: Tensor, index: Any, value: Any) -> bool:
    """Whether an assignment makes a tensor on the host of its value.

    It does for places given by a tensor and for a single place; slices and masks are filled.
    """
    if isinstance(value, Tensor):
        return False
    indices = index if isinstance(index, tuple) else (index,)
    if any(isinstance(i, list) or (isinstance(i, Tensor) and not _is_mask(i)) for i in indices):
        return True
    return len(indices) == target.dim() and all(isinstance(i, int) for i in indices)


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _check_operator(function: Any, args: Any, kwargs: Any) -> None:
    """
    Raises:
        CaptureError: the host must read the value or the shape of the operator's result, or wait
            for other ranks.
    """
    name = function._schema.name
    if function.namespace == "c10d":
        # Python waits for the result of a collective, and a replay runs no Python.
        raise CaptureError(f"{function} cannot be recorded: use one rank, or no decode graphs")
    if name in _INDEXING:
        indices = kwargs.get("indices", args[1] if len(args) > 1 else ())
        if any(i is not None and _is_mask(i) for i in indices):
            raise CaptureError(_refusal("indexing with a mask"))
    elif name in _UNTAGGED_READS or any(tag in function.tags for tag in _READS_DATA):
        raise CaptureError(_refusal(str(function)))


def _refusal(what: str) -> str:
    return (
        f"{what} reads a tensor on the host, which a captured graph cannot do: "
        "use operators of fixed shape (torch.where, gather, masked_fill)"
    )


def _flat(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, tuple | list) else (out,)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from _tensors(inner)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
