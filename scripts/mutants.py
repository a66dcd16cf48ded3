#!/usr/bin/env python3
"""Change one line of a room's source at a time, and report which changes its unit tests miss.

    python scripts/mutants.py policy kv capacity --n 60 --seed 1 [--json mutants.json]

A room is a folder of python/sglang_live; its tests are the folder of that name under test/unit. A
mutant is one changed comparison, arithmetic or boolean operator, min or max, dropped `not` or `~`,
or number (by one, or by 5 %). The seed draws --n of them. Each one is written into a copy of the
tree, never into the tree itself, and is caught if a test fails or runs out of time. Exit status 1
if a mutant lived, 2 if the tests fail without one.

A mutant that lives is a test that is missing, unless it is equivalent: no input tells it from the
original, as with `<` for `<=` where the two sides being equal gives the same result either way.
"""

import argparse
import ast
import difflib
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
N_WORKERS = 2
NICE = 5
# Of the time that the room's tests take unchanged; and at least so long, for a busy machine.
TIMEOUT_FACTOR, LEAST_TIMEOUT_S = 5.0, 60.0

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
        source, name = path.read_text(), str(path.relative_to(root))
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
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)


def passes(tests: list[str], copy: Path, timeout_s: float | None = None) -> bool:
    """Whether the tests, paths in the copy, pass and in time."""
    command = ["nice", "-n", str(NICE), sys.executable, "-m", "pytest"]
    command += ["-x", "-q", "-p", "no:cacheprovider", *tests]
    # Sources of equal size that change within one second would be taken from the byte code.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(copy / "python")}
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        return process.wait(timeout_s) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        process.kill()
        process.wait()


class Trial:
    """Tests mutants in copies of the tree, one copy per worker."""

    def __init__(self, root: Path, place: Path):
        self._copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(N_WORKERS):
            copy_tree(root, place / str(number))
            self._copies.put(place / str(number))
        self._root = root
        self._tests: dict[str, list[str]] = {}
        self._timeouts_s: dict[str, float] = {}

    def start(self, rooms: list[str]) -> list[str]:
        """Run the tests unchanged, file by file. Returns the files that fail.

        The quickest file goes first from then on: most mutants are caught in it.
        """
        failing, took_s = [], {}
        copy = self._copies.get()
        for room in rooms:
            folder = self._root / "test" / "unit" / room
            names = sorted(str(p.relative_to(self._root)) for p in folder.rglob("test_*.py"))
            for name in names:
                began_s = time.monotonic()
                if not passes([name], copy):
                    failing.append(name)
                took_s[name] = time.monotonic() - began_s
            self._tests[room] = sorted(names, key=took_s.__getitem__)
            total_s = sum(took_s[name] for name in names)
            self._timeouts_s[room] = max(LEAST_TIMEOUT_S, TIMEOUT_FACTOR * total_s)
        self._copies.put(copy)
        return failing

    def lives(self, mutant: Mutant) -> bool:
        copy = self._copies.get()
        path = copy / mutant.file
        source = path.read_text()
        try:
            path.write_text(mutant.applied(source))
            return passes(self._tests[mutant.room], copy, self._timeouts_s[mutant.room])
        finally:
            path.write_text(source)
            self._copies.put(copy)


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rooms", nargs="+")
    parser.add_argument("--n", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args(argv)
    mutants = draw(args.rooms, args.n, args.seed, root)
    lived = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        trial = Trial(root, Path(place))
        if failing := trial.start(args.rooms):
            print(f"these fail without a mutant: {', '.join(failing)}", file=sys.stderr)
            return 2
        with ThreadPoolExecutor(N_WORKERS) as pool:
            lives = {pool.submit(trial.lives, mutant): mutant for mutant in mutants}
            for n_done, future in enumerate(as_completed(lives), 1):
                if future.result():
                    mutant = lives[future]
                    lived.append(mutant)
                    print(f"lived: {mutant.file}:{mutant.line}\n{mutant.diff}", flush=True)
                if n_done % 10 == 0:
                    print(f"{n_done} of {len(mutants)} tried, {len(lived)} lived", flush=True)
    lived.sort(key=lambda mutant: (mutant.file, mutant.start, mutant.text))
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
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if lived else 0


if __name__ == "__main__":
    sys.exit(main())
