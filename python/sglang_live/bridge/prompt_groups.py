"""Best-effort requests whose prompts begin alike, which are served one after the other."""


class PromptGroups:
    """Numbers of their groups, by the arrival of the first request."""

    def __init__(self) -> None:
        self._group_of: dict[int, int] = {}
        self._members: dict[int, tuple[int, int]] = {}  # of a group: its prefix, its requests
        self._n_groups = 0

    def __bool__(self) -> bool:
        return bool(self._members)

    def of(self, prefix: int) -> int:
        """The group of a request that arrives."""
        group = self._group_of.get(prefix)
        if group is None:
            self._n_groups += 1
            group = self._group_of[prefix] = self._n_groups
        self._members[group] = (prefix, self._members.get(group, (prefix, 0))[1] + 1)
        return group

    def leave(self, group: int) -> None:
        prefix, n_requests = self._members[group]
        self._members[group] = (prefix, n_requests - 1)
        if n_requests == 1:
            del self._members[group], self._group_of[prefix]
