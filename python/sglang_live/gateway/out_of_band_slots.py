"""How many responses beside their conversations may be made at once, by all callers together.

Owner: one OutOfBandSlots per process. The stages have room for so many more replies
than sessions: one caller's extra responses must not take what another's answer needs.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class OutOfBandSlots:
    limit: int
    n_taken: int = 0

    @property
    def full(self) -> bool:
        return self.n_taken >= self.limit

    def take(self) -> None:
        self.n_taken += 1

    def give_back(self) -> None:
        self.n_taken -= 1
