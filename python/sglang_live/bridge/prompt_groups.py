"""Best-effort requests whose prompts begin alike, which are served one after the other."""

import numpy as np


class PromptGroups:
    """Numbers of their groups, by the arrival of the first request."""

    def __init__(self) -> None:
        self._group_of: dict[int, int] = {}
        self._first: dict[int, bytes] = {}  # the first prompt of a group
        self._members: dict[int, tuple[int, int]] = {}  # of a group: its prefix, its requests
        self._n_groups = 0

    def __bool__(self) -> bool:
        return bool(self._members)

    def of(self, prefix: int, prompt: bytes) -> tuple[int, int]:
        """The group of a request that arrives, and for how many tokens its prompt is that of the
        group's first request.

        Args:
            prompt: int64 token ids.
        """
        group = self._group_of.get(prefix)
        if group is None:
            self._n_groups += 1
            group = self._group_of[prefix] = self._n_groups
            self._first[group] = prompt
        self._members[group] = (prefix, self._members.get(group, (prefix, 0))[1] + 1)
        return group, n_alike(prompt, self._first[group])

    def leave(self, group: int) -> None:
        prefix, n_requests = self._members[group]
        self._members[group] = (prefix, n_requests - 1)
        if n_requests == 1:
            del self._members[group], self._group_of[prefix], self._first[group]


def n_alike(a: bytes, b: bytes) -> int:
    """Number of equal int64 tokens at the beginning of both."""
    n = min(len(a), len(b)) // 8
    differs = np.frombuffer(a, np.int64, n) != np.frombuffer(b, np.int64, n)
    return int(differs.argmax()) if np.count_nonzero(differs) else n


def n_counted_again(groups: np.ndarray, n_shared: np.ndarray) -> int:
    """Tokens that requests share with their group, without one copy for each group.

    Args:
        groups, n_shared: [n] int64, of of().
    """
    if len(groups) < 2:
        return 0
    ordered = np.lexsort((n_shared, groups))
    sorted_groups = groups[ordered]
    is_largest = np.append(sorted_groups[1:] != sorted_groups[:-1], True)
    return int(n_shared.sum() - n_shared[ordered[is_largest]].sum())
