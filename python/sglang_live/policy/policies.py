"""Which policies are on: the value of --live-policies.

In: names. Out: one Policies, passed through to everything that acts by policy.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal

from sglang_live.errors import BadInputError

Order = Literal["urgency", "deadline", "fcfs"]
# Orders of admission; at most one.
ORDERS: tuple[Order, ...] = ("urgency", "deadline", "fcfs")
# What `all` means. `off` is SGLang's own behaviour.
POLICIES = (
    "urgency",
    "pacing",
    "truncate",
    "turn-prefill",
    "preheat",
    "startup-delay",
    "retention",
    "next-use",
    "preload",
    "admission",
    "hybrid",
    "arbiter",
)
NAMES = tuple(sorted({*POLICIES, *ORDERS, "bros"}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """False if every policy is off. What each one does is in docs/scheduling.md.

    order: order of admission; None: none was named, and requests are served as they come.
    """

    order: Order | None = None
    pacing: bool = False
    truncate: bool = False
    turn_prefill: bool = False
    preheat: bool = False
    startup_delay: bool = False
    retention: bool = False
    next_use: bool = False
    preload: bool = False
    admission: bool = False
    hybrid: bool = False
    bros: bool = False
    arbiter: bool = False

    def __post_init__(self) -> None:
        if self.preload and not self.next_use:
            raise BadInputError(
                "policy preload needs next-use, which estimates when users will speak"
            )
        if self.turn_prefill and not self.truncate:
            raise BadInputError("policy turn-prefill needs truncate: what was no turn is truncated")

    @classmethod
    def parse(cls, names: Iterable[str]) -> "Policies":
        """Raises BadInputError for unknown names, and for names that exclude or lack another."""
        names = tuple(names)
        if unknown := [name for name in names if name not in NAMES]:
            raise BadInputError(f"unknown policies {unknown!r}; there are: {list(NAMES)}")
        orders = [order for name in names for order in ORDERS if name == order]
        if len(orders) > 1:
            raise BadInputError(f"policies {orders} exclude each other: choose one order")
        booleans = {name.replace("-", "_"): True for name in names if name not in ORDERS}
        return cls(order=orders[0] if orders else None, **booleans)

    @classmethod
    def from_flag(cls, text: str) -> "Policies":
        """text: `off`, `all`, or a comma list. Raises as parse() does."""
        if text == "off":
            return OFF
        names = [name.strip() for name in text.split(",") if name.strip()]
        if not names:
            raise BadInputError(f"unknown policies {text!r}; there are: {list(NAMES)}")
        return ALL if text == "all" else cls.parse(names)

    @property
    def decides_rounds(self) -> bool:
        """Whether any of these policies decides about rounds; the others concern turns only."""
        return self.order is not None or self.pacing or self.tells_best_effort

    @property
    def tells_best_effort(self) -> bool:
        """Whether best-effort work is told from other work without listeners."""
        return self.hybrid or self.bros

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are on, as parse() takes them."""
        on = [f.name.replace("_", "-") for f in fields(self) if getattr(self, f.name) is True]
        return (*([self.order] if self.order else []), *on)

    def __bool__(self) -> bool:
        return self != OFF


OFF = Policies()
ALL = Policies.parse(POLICIES)
