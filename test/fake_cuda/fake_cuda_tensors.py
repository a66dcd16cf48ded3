"""Which tensors are on the fake device, and what a call with such tensors does.

A tensor is there if its storage is: views and parameters follow. Every call of PyTorch from Python
passes through FakeDevice.
"""

import torch
from fake_cuda_graph import Tape, is_capturing
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

DEVICE = torch.device("cuda", 0)
# Calls that only look at a tensor.
LOOKS = {
    *("untyped_storage", "_weak_ref", "data_ptr", "__set__", "dim", "size", "stride", "numel"),
    *("element_size", "__len__", "storage_offset", "is_contiguous", "is_floating_point"),
    *("__hash__", "type", "__repr__", "is_complex"),
}
# Calls that may have tensors of both devices.
MIXED = {
    *("copy_", "_foreach_copy_", "set_", "to", "type_as", "cpu", "cuda", "pin_memory"),
    *("__getitem__", "__setitem__", "index_put", "index_put_", "is_set_to", "is_same_size"),
    *("_has_compatible_shallow_copy_type", "split", "broadcast_tensors"),
}
# Calls whose result is on the host, or has a shape that depends on values.
WAITS = {
    *("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "unique"),
    *("masked_select", "unique_consecutive", "equal", "allclose", "bincount"),
}
GETTERS = {torch.Tensor.device: "device", torch.Tensor.is_cuda: "is_cuda"}
_storages: dict[int, StorageWeakRef] = {}
_MOST_STORAGES = 200_000


def storage_of(tensor):
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # a tensor without memory
        return None


def is_there(tensor) -> bool:
    storage = storage_of(tensor)
    # The reference keeps the address from being used again.
    found = None if storage is None else _storages.get(storage._cdata)
    return found is not None and not found.expired()


def put_there(tensor) -> None:
    if len(_storages) > _MOST_STORAGES:
        for address in [a for a, reference in _storages.items() if reference.expired()]:
            del _storages[address]
    storage = storage_of(tensor)
    if storage is not None:
        _storages[storage._cdata] = StorageWeakRef(storage)


def tensors_in(*values) -> list:
    return [x for x in tree_flatten(values)[0] if isinstance(x, torch.Tensor)]


def names_device(value) -> bool:
    known = ("cuda", "cpu", "meta")
    return isinstance(value, torch.device) or (
        isinstance(value, str) and value.partition(":")[0] in known
    )


def is_cuda(value) -> bool:
    return str(value).partition(":")[0] == "cuda" or type(value) is int


class FakeDevice(TorchFunctionMode):
    """Of one thread."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__":
            wanted = GETTERS.get(getattr(func, "__self__", None))
            if wanted == "is_cuda":
                return is_there(args[0])
            return DEVICE if wanted and is_there(args[0]) else func(*args, **kwargs)
        if name == "get_device" and is_there(args[0]):
            return 0
        if name == "is_pinned":
            return not is_there(args[0])
        if name in LOOKS:
            return func(*args, **kwargs)
        return self._call(func, name, args, kwargs)

    def _call(self, func, name, args, kwargs):
        kwargs.pop("pin_memory", None)
        if name == "pin_memory":
            return args[0].clone()
        if name == "cuda":
            func, name, args = torch.Tensor.to, "to", (args[0], DEVICE)
        args, kwargs, goes_there = _without_device(name, args, kwargs)
        tensors = tensors_in(args, kwargs)
        there = [is_there(x) for x in tensors]
        if name == "to" and goes_there is None and len(tensors) > 1:  # to the device of another
            goes_there = there[1]
        if any(there) and not all(there) and name not in MIXED and goes_there is None:
            _refuse_mixed(name, tensors, there)
        if any(there) or goes_there:
            _refuse_wait(name, args, kwargs, there, goes_there)
        before = {storage._cdata for x in tensors if (storage := storage_of(x)) is not None}
        result = func(*args, **kwargs)
        if name in ("to", "cpu") and goes_there is not None and there[0] != goes_there:
            same = storage_of(result)._cdata in before
            result = result.clone() if same else result
        goes_there = any(there) if goes_there is None else goes_there
        made = [x for x in tensors_in(result) if _is_made(x, before)]
        for tensor in made if goes_there else ():
            put_there(tensor)
        if is_capturing():
            Tape.current().append(func, args, kwargs, result, made)
        return result


def _without_device(name, args, kwargs):
    """The call on the host, and whether it names the fake device. None: it names no device."""
    goes_there = None
    if kwargs.get("device") is not None:
        goes_there = is_cuda(kwargs["device"])
        kwargs["device"] = torch.device("cpu") if goes_there else kwargs["device"]
    if name in ("to", "new_tensor"):
        for value in filter(names_device, args[1:]):
            goes_there = is_cuda(value)
        args = tuple("cpu" if names_device(x) and is_cuda(x) else x for x in args)
    if name == "cpu":
        goes_there = False
    return args, kwargs, goes_there


def _is_made(tensor, before) -> bool:
    storage = storage_of(tensor)
    return storage is not None and storage._cdata not in before


def _refuse_mixed(name, tensors, there) -> None:
    on_host = [x for x, is_it in zip(tensors, there, strict=True) if not is_it]
    # A number from the host is allowed.
    if any(x.dim() > 0 and x.numel() for x in on_host):
        shapes = [(tuple(x.shape), is_it) for x, is_it in zip(tensors, there, strict=True)]
        raise RuntimeError(
            f"fake CUDA: {name}: expected all tensors to be on the same device: {shapes}"
        )


def _refuse_wait(name, args, kwargs, there, goes_there) -> None:
    if not is_capturing():
        return
    blocking = not kwargs.get("non_blocking", False)
    masks = name in ("__getitem__", "__setitem__") and any(
        x.dtype == torch.bool for x in tensors_in(args[1])
    )
    # A mask with a number is a masked fill.
    by_mask = masks and not (name == "__setitem__" and isinstance(args[2], int | float | bool))
    moves = goes_there is not None and bool(there) and there[0] != goes_there
    leaves = moves and blocking and name in ("to", "cpu")
    from_host = name in ("tensor", "as_tensor") and goes_there
    to_host = name == "copy_" and blocking and there[0] != all(there[1:])
    by_host_index = name in ("__getitem__", "__setitem__", "index_put_") and any(
        not is_there(x) and x.dim() > 0 for x in tensors_in(args, kwargs)
    )
    if (name in WAITS and any(there)) or by_mask or leaves or from_host or to_host or by_host_index:
        raise RuntimeError(f"fake CUDA: {name}: not permitted when the stream is capturing")
