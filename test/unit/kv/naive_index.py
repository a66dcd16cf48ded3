"""A reference for the victim index, which sorts all keys at every decision."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import count

from sglang_live.kv.victim_index import Victim


@dataclass(kw_only=True)
class Row:
    n_tokens: int
    last_use_s: float
    next_use_s: float | None
    whole: bool
    number: int
    until_s: float | None = None

    def remaining_s(self, now_s: float) -> float:
        if self.next_use_s is None:
            return now_s - self.last_use_s
        if self.next_use_s > now_s:
            return self.next_use_s - now_s
        return now_s - self.next_use_s


class NaiveIndex:
    def __init__(self, page_size: int):
        self.page_size = page_size
        self.rows: dict[Hashable, Row] = {}
        self.numbers = count()

    @property
    def evictable_tokens(self) -> int:
        return sum(row.n_tokens for row in self.rows.values() if row.until_s is None)

    @property
    def protected_tokens(self) -> int:
        return sum(row.n_tokens for row in self.rows.values() if row.until_s is not None)

    def put(self, key, *, n_tokens, last_use_s, next_use_s=None, whole=False) -> None:
        old = self.rows.pop(key, None)
        if n_tokens:
            self.rows[key] = Row(
                n_tokens=n_tokens,
                last_use_s=last_use_s,
                next_use_s=next_use_s,
                whole=whole,
                number=next(self.numbers),
                until_s=old.until_s if old else None,
            )

    def remove(self, key) -> None:
        self.rows.pop(key, None)

    def shrink(self, key, n_tokens) -> None:
        self.rows[key].n_tokens = n_tokens
        if not n_tokens:
            del self.rows[key]

    def protect(self, key, until_s) -> None:
        self.rows[key].until_s = until_s
        self.rows[key].number = next(self.numbers)

    def unprotect(self, key) -> None:
        row = self.rows.get(key)
        if row and row.until_s is not None:
            row.until_s, row.number = None, next(self.numbers)

    def ranking(self, now_s: float, protected: bool = False) -> list[Hashable]:
        over = [k for k, r in self.rows.items() if r.until_s is not None and r.until_s <= now_s]
        for key in sorted(over, key=lambda k: (self.rows[k].until_s, self.rows[k].number)):
            self.unprotect(key)
        free = [k for k, row in self.rows.items() if (row.until_s is not None) == protected]
        return sorted(free, key=lambda k: (-self.rows[k].remaining_s(now_s), self.rows[k].number))

    def later(self, now_s: float, later_than_s: float, protected=False) -> list[Hashable]:
        left_s = later_than_s - now_s
        return [
            k for k in self.ranking(now_s, protected) if self.rows[k].remaining_s(now_s) > left_s
        ]

    def victims(self, n_tokens, now_s, *, later_than_s=-math.inf, protected=False) -> list[Victim]:
        found = []
        for key in self.later(now_s, later_than_s, protected):
            row = self.rows[key]
            if n_tokens <= 0:
                break
            taken = 0
            while taken < min(n_tokens, row.n_tokens):  # page by page, from the tail
                in_page = (row.n_tokens - taken - 1) % self.page_size + 1
                taken += in_page
            taken = row.n_tokens if row.whole else taken
            found.append(Victim(key, taken))
            n_tokens -= taken
            self.shrink(key, row.n_tokens - taken)
        return found

    def later_tokens(self, now_s, later_than_s, enough_tokens) -> int:
        keys = self.later(now_s, later_than_s)
        return max(0, min(enough_tokens, sum(self.rows[k].n_tokens for k in keys)))
