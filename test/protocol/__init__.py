"""Checks of the realtime protocol for the events of a server."""

from typing import Any

from sglang_live.conformance.order import EventOrder
from test.protocol import schema


class ServerEvents:
    """Checks the events of one connection, in order.

    Raises AssertionError or ValidationError.
    """

    def __init__(self):
        self._order = EventOrder()

    def see(self, event: dict[str, Any]) -> None:
        schema.check(event)
        self._order.see(event)

    @property
    def item_ids(self) -> tuple[str, ...]:
        """The items of the conversation, in order."""
        return self._order.item_ids
