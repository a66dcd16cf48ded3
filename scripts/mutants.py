#!/usr/bin/env python3
"""Change one line of a room's source at a time, and report which changes its unit tests miss.

    python scripts/mutants.py policy kv capacity --n 60 --seed 1 [--json mutants.json]

A room is a folder of python/sglang_live; its tests are the folder of that name under test/unit. A
mutant is one changed comparison, arithmetic or boolean operator, min or max, dropped `not` or `~`,
or number (by one, or by 5 %). The seed draws --n of them. Each one is written into a copy of the
tree, never into the tree itself, and is caught if a test fails or runs out of CPU time. Exit
status 1 if a mutant lived, 2 if the tests fail without one.

A mutant that lives is a test that is missing, unless it is equivalent: no input tells it from the
original, as with `<` for `<=` where the two sides being equal gives the same result either way.
"""

import argparse
import ast
import difflib
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path

import numpy  # noqa: F401
import pytest
import uvloop  # noqa: F401
from hypothesis import Phase, settings

ROOT = Path(__file__).resolve().parents[1]
N_WORKERS = 2
NICE = 5
MOST_CPU_S = 600.0
# Workers inherit the modules that are imported here: importing them takes longer than most tests.
for _plugin in entry_points(group="pytest11"):
    _plugin.load()
_FORK = multiprocessing.get_context("fork")
_trial: "Trial"

SWAPS: dict[type[ast.AST], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
    ast.Add: ("+", ("-",)),
    ast.Sub: ("-", ("+",)),
    ast.Mult: ("*", ("/",)),
    ast.Div: ("/", ("*",)),
    ast.FloorDiv: ("//", ("*",)),
    ast.Mod: ("%", ("*",)),
    ast.BitAnd: ("&", ("|",)),
    ast.BitOr: ("|", ("&",)),
    ast.And: ("and", ("or",)),
    ast.Or: ("or", ("and",)),
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A replacement of source[start:end], offsets in characters.

    Attributes:
        file: path relative to the root of the tree.
        line: number of the line that it begins in, from 1.
        diff: removed and added lines.
    """

    room: str
    file: str
    line: int
    start: int
    end: int
    text: str
    diff: str

    def applied(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]


@dataclass(frozen=True, slots=True)
class Span:
    start: int
    end: int
    texts: tuple[str, ...]


class Sites:
    """All spans of one source that can be replaced, and by what."""

    def __init__(self, source: str):
        self._source = source
        lines = source.splitlines(keepends=True)
        self._lines = lines
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))

    def spans(self) -> Iterator[Span]:
        tree = ast.parse(self._source)
        # The | of `int | None` is no arithmetic.
        annotations = {id(inner) for node in _annotations(tree) for inner in ast.walk(node)}
        for node in ast.walk(tree):
            if id(node) not in annotations:
                yield from self._of(node)

    def _of(self, node: ast.AST) -> Iterator[Span]:
        match node:
            case ast.Compare():
                for (left, right), op in zip(
                    pairwise((node.left, *node.comparators)), node.ops, strict=True
                ):
                    yield self._swap(self._end(left), self._start(right), op)
            case ast.BoolOp():
                for left, right in pairwise(node.values):
                    yield self._swap(self._end(left), self._start(right), node.op)
            case ast.BinOp(op=op) if type(op) in SWAPS:
                yield self._swap(self._end(node.left), self._start(node.right), op)
            case ast.AugAssign(op=op) if type(op) in SWAPS:
                yield self._swap(self._end(node.target), self._start(node.value), op)
            case ast.UnaryOp(op=ast.Not() | ast.Invert()):
                begin, end = self._start(node), self._start(node.operand)
                # `not (a or b)` keeps its parenthesis.
                bracket = self._source.find("(", begin, end)
                yield Span(begin, end if bracket < 0 else bracket, ("",))
            case ast.Call(func=ast.Name(id="min" | "max" as name) as func):
                other = "max" if name == "min" else "min"
                yield Span(self._start(func), self._end(func), (other,))
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                yield Span(self._start(node), self._end(node), _near(value))

    def _swap(self, start: int, end: int, op: ast.AST) -> Span:
        sign, others = SWAPS[type(op)]
        # Beside the operator there may be parentheses and comments, and line breaks within it.
        between = re.sub("#.*", lambda comment: " " * len(comment[0]), self._source[start:end])
        found = re.search(r"\s+".join(map(re.escape, sign.split())), between)
        assert found is not None, between
        return Span(start + found.start(), start + found.end(), others)

    def _start(self, node: ast.AST) -> int:
        return self._offset(node.lineno, node.col_offset)

    def _end(self, node: ast.AST) -> int:
        return self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, n_bytes: int) -> int:
        """ast counts bytes of UTF-8 within a line."""
        in_line = self._lines[line - 1].encode()[:n_bytes].decode()
        return self._starts[line - 1] + len(in_line)


def _annotations(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if (annotation := getattr(node, name, None)) is not None:
                yield annotation


def _near(value: int | float) -> tuple[str, ...]:
    if isinstance(value, int):
        return str(value + 1), str(value - 1)
    if value == 0 or not math.isfinite(value):
        return ("1.0",)
    return repr(value * 1.05), repr(value * 0.95)


def mutants_of(room: str, root: Path = ROOT) -> list[Mutant]:
    """All there are, in the order of the source."""
    found = []
    for path in sorted((root / "python" / "sglang_live" / room).rglob("*.py")):
        source, name = path.read_text("utf-8"), str(path.relative_to(root))
        for span in Sites(source).spans():
            line = source.count("\n", 0, span.start) + 1
            for text in span.texts:
                changed = source[: span.start] + text + source[span.end :]
                diff = _diff(source, changed)
                found.append(Mutant(room, name, line, span.start, span.end, text, diff))
    return found


def _diff(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def draw(rooms: list[str], n: int, seed: int, root: Path = ROOT) -> list[Mutant]:
    everything = [mutant for room in rooms for mutant in mutants_of(room, root)]
    return random.Random(seed).sample(everything, min(n, len(everything)))


def copy_tree(root: Path, to: Path) -> None:
    """Files that git tracks or would track, as they are in the working tree."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(
        command, cwd=root, capture_output=True, encoding="utf-8", check=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)


def tested(tests: list[str], copy: Path, limit_s: float = MOST_CPU_S) -> tuple[bool, float]:
    """Runs tests, paths in the copy, in a fork of this process, which has imported pytest.

    Returns:
        Whether they passed before they had used limit_s of CPU time, and how much they used.
    """
    child = os.fork()
    if not child:
        status = 1
        try:
            _run_tests(tests, copy, limit_s)
            status = 0
        finally:
            os._exit(status)
    _, status, used = os.wait4(child, 0)
    return status == 0, used.ru_utime + used.ru_stime


def _run_tests(tests: list[str], copy: Path, limit_s: float) -> None:
    """Raises AssertionError unless they pass."""
    # Of CPU time, because how busy the machine is must not decide.
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit_s), math.ceil(limit_s)))
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    os.chdir(copy)
    sys.path[:0] = [str(copy / "python"), str(copy)]
    # The installed package is imported at every start of Python, for its shim of torchvision.
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang_live"]:
        del sys.modules[name]
    # Sources of equal size that change within one second would be taken from the byte code.
    sys.dont_write_bytecode = True
    arguments = ["-x", "-q", "-p", "no:cacheprovider", *tests]
    assert pytest.main(arguments, [_FirstExample()]) == pytest.ExitCode.OK


class _FirstExample:
    """A plugin with which hypothesis stops at any example that fails: shrinking takes minutes."""

    def pytest_configure(self) -> None:
        phases = Phase.explicit, Phase.generate
        settings.register_profile("mutants", settings(), phases=phases, database=None)
        settings.load_profile("mutants")


class Trial:
    """Tests mutants of a tree. Lives in one worker process, with a copy of its own."""

    def __init__(self, root: Path, place: Path):
        os.nice(NICE)
        self._copy = place / str(os.getpid())
        copy_tree(root, self._copy)

    def timed(self, test: str) -> tuple[bool, float]:
        """Whether a file of tests passes without a mutant, and the CPU time it takes."""
        return tested([test], self._copy)

    def lives(self, mutant: Mutant, tests: list[str], limit_s: float) -> bool:
        path = self._copy / mutant.file
        source = path.read_text("utf-8")
        try:
            path.write_text(mutant.applied(source), "utf-8")
            return tested(tests, self._copy, limit_s)[0]
        finally:
            path.write_text(source, "utf-8")


def _make_trial(root: Path, place: Path) -> None:
    global _trial
    _trial = Trial(root, place)


def _timed(test: str) -> tuple[bool, float]:
    return _trial.timed(test)


def _lives(mutant: Mutant, tests: list[str], limit_s: float) -> bool:
    return _trial.lives(mutant, tests, limit_s)


def survivors(rooms: list[str], mutants: list[Mutant], root: Path = ROOT) -> list[Mutant]:
    """Those that no test of their room catches.

    Raises:
        SystemExit: with status 2, if tests fail without a mutant.
    """
    lived = []
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as place,
        ProcessPoolExecutor(N_WORKERS, _FORK, _make_trial, (root, Path(place))) as pool,
    ):
        tests = {
            room: [str(path.relative_to(root)) for path in _tests_of(room, root)] for room in rooms
        }
        took = {test: pool.submit(_timed, test) for room in rooms for test in tests[room]}
        if failing := [test for test, future in took.items() if not future.result()[0]]:
            print(f"these fail without a mutant: {', '.join(failing)}", file=sys.stderr)
            raise SystemExit(2)
        used_s = {test: future.result()[1] for test, future in took.items()}
        # The quickest file goes first: most mutants are caught in it.
        ordered = {room: sorted(tests[room], key=used_s.__getitem__) for room in rooms}
        limits_s = {room: 1 + 3 * sum(used_s[test] for test in tests[room]) for room in rooms}
        lives = {
            pool.submit(_lives, mutant, ordered[mutant.room], limits_s[mutant.room]): mutant
            for mutant in mutants
        }
        for n_done, future in enumerate(as_completed(lives), 1):
            if future.result():
                mutant = lives[future]
                lived.append(mutant)
                print(f"lived: {mutant.file}:{mutant.line}\n{mutant.diff}", flush=True)
            if n_done % 10 == 0:
                print(f"{n_done} of {len(mutants)} tried, {len(lived)} lived", flush=True)
    return sorted(lived, key=lambda mutant: (mutant.file, mutant.start, mutant.text))


def _tests_of(room: str, root: Path) -> list[Path]:
    return sorted((root / "test" / "unit" / room).rglob("test_*.py"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rooms", nargs="+")
    parser.add_argument("--n", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args()
    mutants = draw(args.rooms, args.n, args.seed)
    lived = survivors(args.rooms, mutants)
    n_caught = len(mutants) - len(lived)
    print(f"{n_caught} of {len(mutants)} caught")
    if args.json:
        result = {
            "rooms": args.rooms,
            "seed": args.seed,
            "n": len(mutants),
            "n_caught": n_caught,
            "lived": [asdict(mutant) for mutant in lived],
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    return 1 if lived else 0


if __name__ == "__main__":
    sys.exit(main())
