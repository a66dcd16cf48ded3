"""JSON schemas that accept nothing, because they refer to themselves and to nothing else.

In: a schema whose references were checked. Out: whether each of its parts can come to an end.
xgrammar compiles them, and then allows no token at all: the request would be aborted in its batch.
"""

from typing import Any

from sglang_live.errors import BadInputError
from sglang_live.gateway.tool_schema import target_of


def has_endless_part(root: dict[str, Any]) -> bool:
    """Whether some part leads back to itself by references and choices alone.

    A part that writes anything before it comes to itself, as lists and trees do, has an end.
    """
    parts = _objects_in(root)
    waits_for = {id(part): _must_end(root, part) for part in parts}
    needed_by: dict[int, list[int]] = {}
    for part_id, (_, others) in waits_for.items():
        for other in others:
            needed_by.setdefault(other, []).append(part_id)
    left = {part_id: n for part_id, (n, _) in waits_for.items()}
    ended = [part_id for part_id, n in left.items() if n == 0]
    n_ended = 0
    while ended:
        n_ended += 1
        for part_id in needed_by.get(ended.pop(), ()):
            left[part_id] -= 1
            if left[part_id] == 0:
                ended.append(part_id)
    return n_ended < len(parts)


def _objects_in(root: dict[str, Any]) -> list[dict[str, Any]]:
    found, pending = [], [root]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            found.append(part)
        pending += part.values() if isinstance(part, dict) else part
        pending = [inner for inner in pending if isinstance(inner, dict | list)]
    return found


def _must_end(root: dict[str, Any], part: dict[str, Any]) -> tuple[int, list[int]]:
    """How many of which other parts must end, so that this one does."""
    pointer = part.get("$ref")
    if isinstance(pointer, str):  # xgrammar looks at nothing beside it
        try:
            target = target_of(root, pointer)
        except BadInputError:
            return 0, []  # in a place that is no schema
        return (1, [id(target)]) if isinstance(target, dict) else (0, [])
    for name in ("anyOf", "oneOf", "allOf"):
        branches = part.get(name)
        if not isinstance(branches, list) or not branches:
            continue
        others = [id(branch) for branch in branches if isinstance(branch, dict)]
        if name == "allOf":
            return len(others), others
        return (1, others) if len(others) == len(branches) else (0, [])
    return 0, []
