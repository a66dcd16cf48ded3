"""Write mooncake_chains.json from Mooncake's conversation trace.

    python benchmark/workloads/make_mooncake_chains.py conversation_trace.jsonl.gz

The trace has no session ids. A request is taken to continue an earlier one if its prompt begins
with all full blocks of that one's prompt, at least two, and is longer. That is an inference:
conversations under 1,024 tokens cannot be linked, and the trace's hour cuts long ones short.
"""

import gzip
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 512
MIN_BLOCKS = 2
# A longer chain would fill a small pool alone, or run alone at the end.
MIN_TURNS, MAX_TURNS = 3, 12
MAX_TOKENS = 32_768

WHAT = (
    "Conversations in the order of their first turn. A turn is [start_s, input_length, "
    "output_length, new_tokens]: seconds since the trace began, in steps of 3 s; prompt and reply "
    "in tokens; of the prompt, what neither the last prompt nor the last reply held. Sessions are "
    "inferred from prefixes of 512-token blocks. Left out: conversations that branch, lose tokens "
    f"or have turns at the same time, and all but those of {MIN_TURNS} to {MAX_TURNS} turns that "
    f"end within {MAX_TOKENS} tokens."
)
SOURCE = (
    "Mooncake (FAST 2025), kvcache-ai/Mooncake, commit 3b5a5941, "
    "FAST25-release/traces/conversation_trace.jsonl"
)

Row = dict[str, Any]
Turn = tuple[float, int, int, int]


def read(path: Path) -> list[Row]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        return [json.loads(line) for line in file]


def link(rows: list[Row]) -> list[int | None]:
    """The row that each row continues: the one with the longest shared prefix, then the latest."""
    newest: dict[tuple[int, ...], int] = {}
    parents: list[int | None] = []
    for row in rows:
        blocks = tuple(row["hash_ids"])
        candidates = (newest.get(blocks[:n]) for n in range(len(blocks), MIN_BLOCKS - 1, -1))
        longer = (p for p in candidates if p is not None and _is_longer(row, rows[p]))
        parents.append(next(longer, None))
        if len(full := blocks[: row["input_length"] // BLOCK_TOKENS]) >= MIN_BLOCKS:
            newest[full] = len(parents) - 1
    return parents


def chains(rows: list[Row]) -> list[list[Turn]]:
    """Every conversation without branches, whole."""
    parents = link(rows)
    children: dict[int, list[int]] = {}
    for row, parent in enumerate(parents):
        if parent is not None:
            children.setdefault(parent, []).append(row)
    found = []
    for first in (row for row, parent in enumerate(parents) if parent is None):
        path = [first]
        while len(following := children.get(path[-1], [])) == 1:
            path += following
        if not following:
            found.append(_turns([rows[row] for row in path]))
    return found


def keep(chain: list[Turn]) -> bool:
    grows = all(new_tokens > 0 for _, _, _, new_tokens in chain)
    ascends = all(a[0] < b[0] for a, b in pairwise(chain))
    last_tokens = chain[-1][1] + chain[-1][2]
    return MIN_TURNS <= len(chain) <= MAX_TURNS and last_tokens <= MAX_TOKENS and grows and ascends


def _is_longer(row: Row, parent: Row) -> bool:
    return row["input_length"] > parent["input_length"]


def _turns(path: list[Row]) -> list[Turn]:
    turns, held = [], 0
    for row in path:
        n_input, n_output = row["input_length"], row["output_length"]
        # Bins of 3 s, of which the trace writes some a millisecond short.
        turns.append((round(row["timestamp"] / 1000), n_input, n_output, n_input - held))
        held = n_input + n_output
    return turns


def main() -> None:
    kept = [chain for chain in chains(read(Path(sys.argv[1]))) if keep(chain)]
    head = {"what": WHAT, "source": SOURCE, "licence": "Apache-2.0"}
    lines = ",\n".join("  " + json.dumps(chain) for chain in kept)
    text = json.dumps(head, indent=1)[:-2] + f',\n "chains": [\n{lines}\n ]\n}}\n'
    Path(__file__).with_name("mooncake_chains.json").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
