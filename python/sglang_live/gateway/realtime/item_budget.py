"""Limit on the memory of the items of all conversations together.

Owner: one ItemBudget per process. Each conversation has its own limit too; without this one, many
full conversations would exhaust the machine's memory.
"""

from dataclasses import dataclass

from sglang_live.errors import CapacityError


@dataclass(slots=True)
class ItemBudget:
    limit_bytes: int
    used_bytes: int = 0

    @property
    def over(self) -> bool:
        return self.used_bytes > self.limit_bytes

    def check(self, n_bytes: int) -> None:
        """Raises CapacityError if n_bytes more do not fit."""
        if self.used_bytes + n_bytes > self.limit_bytes:
            raise CapacityError(
                f"This item has {n_bytes} bytes, and the conversations of this server hold "
                f"{self.used_bytes} of {self.limit_bytes}. Delete items, or try again later."
            )

    def take(self, n_bytes: int) -> None:
        self.used_bytes += n_bytes
