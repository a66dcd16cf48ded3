"""Pages of lists, as OpenAI's clients read them: `after`, `limit`, `order`.

In: the parameters of a URL. Out: rows of a table in the order of their ids.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_live.extensions.batches.database import Database
from sglang_live.extensions.batches.records import is_id
from sglang_live.gateway.errors import ClientEventError, cut

_ORDERS = {"asc": (">", "ASC"), "desc": ("<", "DESC")}


@dataclass(frozen=True, slots=True)
class Page:
    """after: id of the last row of the page before; None: the first page."""

    after: str | None
    limit: int
    order: str

    def read(
        self, database: Database, table: str, where: str, values: Iterable[Any]
    ) -> tuple[list[Any], bool]:
        """The rows of the page, and whether others follow."""
        sign, direction = _ORDERS[self.order]
        values = list(values)
        if self.after is not None:
            where, values = f"{where} AND id {sign} ?", [*values, self.after]
        rows = database.rows(
            f"SELECT * FROM {table} WHERE {where} ORDER BY id {direction} LIMIT ?",
            *values,
            self.limit + 1,
        )
        return rows[: self.limit], len(rows) > self.limit


def read_page(
    query: Mapping[str, str], *, prefix: str, most: int, default: int, others: tuple[str, ...] = ()
) -> Page:
    """
    Args:
        prefix: of the list's ids. most, default: of `limit`.
        others: names of further parameters of the URL.
    Raises:
        ClientEventError: a parameter is unknown or wrong.
    """
    for name in query:
        if name not in ("after", "limit", "order", *others):
            raise ClientEventError(
                f"Unknown parameter in the URL: {cut(name)!r}.",
                code="unknown_parameter",
                param=name,
            )
    limit, order, after = query.get("limit", str(default)), query.get("order", "desc"), None
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= most):
        raise ClientEventError(f"limit must be 1 to {most}, got {cut(limit)!r}.", param="limit")
    if order not in _ORDERS:
        raise ClientEventError(f"order must be asc or desc, got {cut(order)!r}.", param="order")
    if (after := query.get("after") or None) is not None and not is_id(after, prefix):
        raise ClientEventError(f"after is no id of this list: {cut(after)!r}.", param="after")
    return Page(after, int(limit), order)


def list_body(objects: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": objects,
        "first_id": objects[0]["id"] if objects else None,
        "last_id": objects[-1]["id"] if objects else None,
        "has_more": has_more,
    }
