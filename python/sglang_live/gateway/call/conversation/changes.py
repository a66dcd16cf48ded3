"""Changes of a conversation that its protocol is told of.

In: complete items, keys of what the model's session has compacted. Out: a changed Conversation.
Owner: one ConversationChanges per connection.
"""

from collections.abc import Collection

from sglang_live.gateway.call.conversation.conversation import Conversation
from sglang_live.gateway.call.conversation.items import Item
from sglang_live.gateway.call.ports import ItemPort
from sglang_live.telemetry.metrics import GatewayMetrics


class ConversationChanges:
    def __init__(self, conversation: Conversation, port: ItemPort, metrics: GatewayMetrics):
        self.conversation = conversation
        self._port = port
        self._metrics = metrics

    def add(self, item: Item, after_id: str | None = None) -> None:
        """Insert a complete item into the conversation."""
        before = self.conversation.insert(item, after_id)
        self._port.item_added(item, before)
        self.drop_oldest_if_full()

    def drop_oldest_if_full(self) -> None:
        for item_id in self.conversation.drop_oldest_if_full():
            self._dropped(item_id, "full")

    def drop_compacted(self, keys: Collection[str], *, response_id: str) -> None:
        """Drop the items with these history keys, which the model's session has compacted.

        Args:
            response_id: of the response that compacted them.
        """
        for item in self.conversation.seen_as(keys) if keys else ():
            # Function calls that an item represents leave with it; else the next turn's history
            # would have them again, as text.
            for gone in (item, *self.conversation.calls_with(item)):
                self.conversation.delete(gone)
                self._dropped(gone.id, "window", response_id)

    def _dropped(self, item_id: str, reason: str, response_id: str | None = None) -> None:
        self._metrics.items_dropped.labels(reason).inc()
        self._port.item_dropped(item_id, response_id)
