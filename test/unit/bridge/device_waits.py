"""Places in which the scheduler's thread could wait for the device, from the source.

A read of a device's tensor (`item`, `tolist`, `nonzero`, `cpu`, `int(x.max())` …) waits until the
device has computed it, and so does a copy to the device from pageable memory. On a CPU neither
costs anything, so only the source tells. Comparisons of tensors and indices by masks are not found.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "python" / "sglang_live"
READS = {"item", "tolist", "nonzero", "cpu", "numpy", "cuda", "synchronize", "argwhere", "unique"}
REDUCTIONS = {"max", "min", "sum", "any", "all", "argmax", "argmin", "mean"}
MAKERS = {"torch.tensor", "torch.as_tensor", "torch.from_numpy"}


def waits_in(path: Path) -> Iterator[str]:
    """ "<function> <what>" of each place in a file."""
    yield from _walk(ast.parse(path.read_text()), [])


def _walk(node: ast.AST, scope: list[str]) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inner = scope
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = [*scope, child.name]
        elif isinstance(child, ast.Call) and (what := _what(child)):
            yield f"{'.'.join(scope)} {what}"
        yield from _walk(child, inner)


def _what(call: ast.Call) -> str:
    """Name of a call that could wait; empty for others."""
    if isinstance(call.func, ast.Name):
        argument = call.args[0] if call.args else None
        reads = isinstance(argument, ast.Subscript) or (
            isinstance(argument, ast.Call)
            and isinstance(argument.func, ast.Attribute)
            and argument.func.attr in REDUCTIONS
        )
        return call.func.id if reads and call.func.id in ("int", "bool", "float") else ""
    if not isinstance(call.func, ast.Attribute):
        return ""
    if ast.unparse(call.func) in MAKERS:
        return call.func.attr if any(word.arg == "device" for word in call.keywords) else ""
    if call.func.attr == "to":
        return "" if all(map(_is_dtype, call.args)) and not _names_device(call) else "to"
    return call.func.attr if call.func.attr in READS else ""


def _names_device(call: ast.Call) -> bool:
    return any(word.arg == "device" for word in call.keywords)


def _is_dtype(node: ast.expr) -> bool:
    text = ast.unparse(node)
    return text == "dtype" or text.endswith(".dtype") or text.startswith(("torch.int", "torch.f"))
