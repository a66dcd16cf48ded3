"""SGLang's server arguments, checked by name and type before any engine starts.

In: flags that are not the server's own, as text. Out: arguments as `ServerArgs` takes them.
They are read from SGLang's source, because importing it takes eight seconds and torch, which the
server's own process does not need.
"""

import ast
import importlib.util
import math
import re
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from sglang_live.errors import BadInputError, LiveError

_SI = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_IEC = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_WITH_SUFFIX = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)")
# Functions and classes, which no command line can name.
_UNTYPABLE = re.compile(r"Callable|\btype\b")
# Set by the server itself: a value from a flag would be overwritten silently.
RESERVED = {
    "host": "SGLang's own API is reached through the server: see --host",
    "port": "ports between the processes are chosen by the server: see --port",
    "model_path": "all stages load one checkpoint: see --model-path",
    "enable_dp_attention": "live streams need SGLang without DP attention",
    "attn_dp_size": "live streams need SGLang without DP attention",
    "dp_size": "replicas of a stage are started with --STAGE.replicas",
    "base_gpu_id": "devices are named with --STAGE.device",
    "scheduler_recv_interval": "text and interruptions are received in every round",
}


@dataclass(frozen=True, slots=True)
class EngineArgument:
    """
    name: field of ServerArgs.
    kind: its annotation, without Optional.
    choices: valid values. None: all, or known at runtime only.
    aliases: further spellings of SGLang's command line, in the form of `name`.
    """

    name: str
    kind: str
    choices: tuple[Any, ...] | None = None
    aliases: tuple[str, ...] = ()

    def read(self, text: str | None) -> Any:
        """
        Args:
            text: as typed. None: the flag has no value.
        Raises:
            ValueError: with what is expected instead.
        """
        if text is None:
            if self.kind != "bool":
                raise ValueError("needs a value")
            return True
        value = _read(self.kind, text)
        if self.choices is not None:
            for one in value if isinstance(value, list) else [value]:
                if one not in self.choices:
                    raise ValueError(f"takes one of {', '.join(map(str, self.choices))}")
        return value


@cache
def engine_arguments() -> dict[str, EngineArgument]:
    """By every spelling.

    Raises:
        LiveError: SGLang is not installed, or keeps its arguments elsewhere.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise LiveError("SGLang is not installed: scripts/setup.sh")
    groups = Path(spec.submodule_search_locations[0]) / "srt" / "arg_groups"
    lists = _named_lists(groups / "choices.py")
    found: dict[str, EngineArgument] = {}
    for path in sorted((groups / "fields").glob("*.py")):
        for argument in _arguments_of(path, lists):
            for name in (argument.name, *argument.aliases):
                found[name] = argument
    if "mem_fraction_static" not in found:
        raise LiveError(f"this SGLang declares its arguments elsewhere than in {groups}")
    return found


def _arguments_of(path: Path, lists: dict[str, tuple[Any, ...]]) -> list[EngineArgument]:
    classes = [node for node in _tree(path).body if isinstance(node, ast.ClassDef)]
    fields = [
        (line.target.id, line.annotation)
        for node in classes
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    ]
    arguments = [
        _argument(name, annotation, lists)
        for name, annotation in fields
        if not name.startswith("_")  # SGLang's own notes
    ]
    return [found for found in arguments if not _UNTYPABLE.search(found.kind)]


def _argument(name: str, annotation: ast.expr, lists: dict[str, tuple[Any, ...]]) -> EngineArgument:
    details: dict[str, ast.expr] = {}
    kind = annotation
    if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "A":
        assert isinstance(kind.slice, ast.Tuple)
        kind, *notes = kind.slice.elts
        for note in notes:
            if isinstance(note, ast.Call):
                details |= {word.arg: word.value for word in note.keywords if word.arg is not None}
    text = ast.unparse(kind)
    if text.startswith("Optional["):
        text = text.removeprefix("Optional[").removesuffix("]")
    choices = _constant(details.get("choices"), lists)
    if text.startswith("Literal["):
        choices = choices or _constant(ast.parse(text.removeprefix("Literal"), mode="eval").body)
        assert choices is not None
        text = type(next(c for c in choices if c is not None)).__name__
    parser = ast.unparse(details["type_parser"]) if "type_parser" in details else ""
    if parser == "human_readable_int":
        text = parser
    elif parser == "json.loads" or parser.startswith("json_list") or "Config" in text:
        text = "json"
    spellings = list(_constant(details.get("aliases")) or ())
    if "cli_name" in details:
        spellings.append(ast.literal_eval(details["cli_name"]))
    aliases = tuple(word.lstrip("-").replace("-", "_") for word in spellings)
    return EngineArgument(name, text, tuple(choices) if choices else None, aliases)


def _constant(
    node: ast.expr | None, lists: dict[str, tuple[Any, ...]] | None = None
) -> tuple[Any, ...] | None:
    """The values of a literal list, or of one of `lists`. None: it is neither."""
    if node is None:
        return None
    if isinstance(node, ast.Name):
        return (lists or {}).get(node.id)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _constant(node.left, lists), _constant(node.right, lists)
        return None if left is None or right is None else left + right
    try:
        return tuple(ast.literal_eval(node))
    except (ValueError, TypeError):
        return None


def _named_lists(path: Path) -> dict[str, tuple[Any, ...]]:
    lists: dict[str, tuple[Any, ...]] = {}
    for node in _tree(path).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values = _constant(node.value, lists)
            if values is not None:
                lists[node.targets[0].id] = values
    return lists


def _tree(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text("utf-8"))
    except (OSError, SyntaxError) as error:
        raise LiveError(f"cannot read SGLang's arguments in {path}: {error}") from error


def _read(kind: str, text: str) -> Any:
    match kind:
        case "bool":
            return _bool(text)
        case "int":
            return _number(int, text, "a whole number")
        case "human_readable_int":
            return _int_with_suffix(text)
        case "float":
            value = _number(float, text, "a number")
            if not math.isfinite(value):
                raise ValueError("takes a number")
            return value
        case "json":
            return _json(text)
    element = re.fullmatch(r"[Ll]ist\[(int|float|str)\]", kind)
    if element:
        parts = _json(text) if text.startswith("[") else text.split(",")
        return [_read(element[1], str(part).strip()) for part in parts]
    if kind.startswith(("Dict[", "dict[")) or (kind != "str" and text[:1] in ("{", "[")):
        return _json(text)
    return text


def _bool(text: str) -> bool:
    try:
        return {"true": True, "false": False}[text.lower()]
    except KeyError:
        raise ValueError("takes true or false, or no value") from None


def _number(kind: type, text: str, what: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"takes {what}") from None


def _int_with_suffix(text: str) -> int:
    match = _WITH_SUFFIX.fullmatch(text.strip())
    if not match:
        return _number(int, text, "a whole number, or one as 64k or 64Ki")
    number, suffix = match.groups()
    if suffix in _IEC:
        return _number(int, number, f"a whole number of {suffix}") * _IEC[suffix]
    return int(Decimal(number) * _SI[suffix])


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text.encode())
    except (msgspec.MsgspecError, UnicodeError):
        raise ValueError("takes JSON") from None


def read_engine_argument(typed: str, name: str, text: str | None) -> tuple[str, Any]:
    """One argument of an engine: its field of ServerArgs, and its value.

    Args:
        typed: the flag as it was typed, for error messages.
        name: the flag without prefix, with underscores.
    Raises:
        KeyError: SGLang has no such argument.
        BadInputError: the server sets it, or the value has another type.
    """
    known = engine_arguments()
    argument = known.get(name)
    if argument is None and name.startswith("no_") and text is None:
        argument, text = known.get(name.removeprefix("no_")), "false"
        if argument is not None and argument.kind != "bool":
            argument = None
    if argument is None:
        raise KeyError(name)
    if argument.name in RESERVED:
        raise BadInputError(f"{typed}: {RESERVED[argument.name]}")
    try:
        return argument.name, argument.read(text)
    except ValueError as error:
        got = "" if text is None else f", got {text!r}"
        raise BadInputError(f"{typed} {error}{got}") from None
