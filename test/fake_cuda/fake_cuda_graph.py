"""Graphs of the fake device: the calls of a capture, made again into the same tensors."""

import contextlib
import sys
import threading

_capturing: dict[int, "Tape"] = {}  # by thread


def is_capturing() -> bool:
    return threading.get_ident() in _capturing


class Tape:
    def __init__(self):
        self._calls = []

    @staticmethod
    def current() -> "Tape":
        return _capturing[threading.get_ident()]

    def append(self, func, args, kwargs, result, made) -> None:
        """made: tensors of the result with memory of their own; a replay fills them."""
        from fake_cuda_tensors import tensors_in

        ids = {id(tensor) for tensor in made}
        kept = [(i, x) for i, x in enumerate(tensors_in(result)) if id(x) in ids]
        self._calls.append((func, args, kwargs, kept))

    def replay(self) -> None:
        import torch
        from fake_cuda_tensors import tensors_in

        with torch._C.DisableTorchFunction():
            for func, args, kwargs, kept in self._calls:
                outputs = tensors_in(func(*args, **kwargs)) if kept else func(*args, **kwargs)
                for i, tensor in kept:
                    tensor.copy_(outputs[i])


class FakeGraph:
    def __init__(self, keep_graph=False):
        self.tape = None
        self._new_segment = False  # of several, as in a prefill, and not replayed yet

    def capture_begin(self, pool=None, capture_error_mode="global"):
        _capturing[threading.get_ident()] = Tape()

    def capture_end(self):
        self.tape = _capturing.pop(threading.get_ident())
        self._new_segment = True

    def instantiate(self):
        """A tape can be replayed as it is."""

    def replay(self):
        if self.tape is None:
            raise RuntimeError("fake CUDA: the graph was not captured")
        if self._new_segment:
            self._new_segment = False
            print("fake CUDA: a segment is replayed", file=sys.stderr, flush=True)
        self.tape.replay()

    def pool(self):
        return (0, 1)

    def reset(self):
        self.tape = None


class FakeCapture(contextlib.AbstractContextManager):
    """Takes the place of torch.cuda.graph."""

    def __init__(self, cuda_graph, pool=None, stream=None, capture_error_mode="global"):
        self._graph = cuda_graph

    def __enter__(self):
        _capturing[threading.get_ident()] = Tape()

    def __exit__(self, kind, *_):
        tape = _capturing.pop(threading.get_ident())
        if kind is None:
            self._graph.tape = tape


def record_triton() -> None:
    """Have launches of interpreted kernels recorded, too."""
    import torch
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def launch(kernel, *args, **kwargs):
        def call():
            with torch._C.DisableTorchFunction():
                return run(kernel, *args, **kwargs)

        if is_capturing():
            Tape.current().append(call, (), {}, None, [])
        return call()

    InterpretedFunction.run = launch
