"""The conversation.item.* events of a client, and items that the server drops.

In: one event. Out: a changed Conversation and the server events that report it; or
ClientEventError and no change.
"""

from collections.abc import Collection

from sglang_live.gateway.audio.codec import WireFormat
from sglang_live.gateway.errors import ClientEventError
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.realtime.conversation.assistant_item import AssistantItem
from sglang_live.gateway.realtime.conversation.conversation import Conversation
from sglang_live.gateway.realtime.conversation.item_schema import build_item
from sglang_live.gateway.realtime.conversation.items import Item
from sglang_live.gateway.realtime.events import (
    ItemCreate,
    ItemDelete,
    ItemRetrieve,
    ItemTruncate,
)
from sglang_live.gateway.realtime.outbox import Emit

# Clients compute the end from what they have played, rounded and sometimes a buffer too late. Some
# of them end at an error, so a small excess is accepted.
TRUNCATE_TOLERANCE_MS = 500


class ConversationEvents:
    def __init__(self, parts: GatewayParts, conversation: Conversation, emit: Emit):
        self.conversation = conversation
        self._parts = parts
        self._emit = emit

    def add(self, item: Item, after_id: str | None = None) -> None:
        """Insert a complete item into the conversation and report it."""
        before = self.conversation.insert(item, after_id)
        for kind in ("added", "done"):
            self._emit(f"conversation.item.{kind}", previous_item_id=before, item=item.to_json())
        self.drop_oldest_if_full()

    def drop_oldest_if_full(self) -> None:
        for item_id in self.conversation.drop_oldest_if_full():
            self._report_dropped(item_id, "full")

    def drop_compacted(self, keys: Collection[str], *, response_id: str) -> None:
        """Drop the items with these history keys, which the model's session has compacted.

        Args:
            response_id: response whose turn compacted them. Its response.done comes first.
        """
        for item in self.conversation.seen_as(keys) if keys else ():
            # Function calls that an item represents leave with it; else the next turn's history
            # would have them again, as text.
            for gone in (item, *self.conversation.calls_with(item)):
                self.conversation.delete(gone)
                self._report_dropped(gone.id, "window", response_id)

    async def create(self, event: ItemCreate, audio_format: WireFormat) -> None:
        """Raises ClientEventError, or CapacityError while all conversations together are full."""
        self.conversation.check_insert(event.item.id, event.previous_item_id)
        item = build_item(
            event.item,
            audio_format,
            max_bytes=self._parts.config.inputs.max_append_bytes,
            path="item",
            call_ids=self.conversation.call_ids,
        )
        await self._parts.context_limit.check_item(item, event.item, "item")
        # Meanwhile a response may have inserted or dropped an item.
        self.conversation.check_insert(event.item.id, event.previous_item_id)
        self.conversation.budget.check(item.size_bytes)
        self.add(item, event.previous_item_id)

    def delete(self, event: ItemDelete) -> None:
        item = self.conversation.get(event.item_id, action="delete")
        self.conversation.delete(item)
        if item.answers in self.conversation.call_ids:
            self.conversation.call_ids[item.answers] = False
        self._emit("conversation.item.deleted", item_id=event.item_id)

    def retrieve(self, event: ItemRetrieve, audio_format: WireFormat) -> None:
        item = self.conversation.get(event.item_id, action="retrieve")
        self._emit("conversation.item.retrieved", item=item.to_json(audio_format))

    def truncate(self, event: ItemTruncate) -> None:
        item = self.conversation.get(event.item_id, action="truncate")
        if not isinstance(item, AssistantItem) or item.modality != "audio":
            raise ClientEventError(
                "Only model output audio messages can be truncated.", param="item_id"
            )
        if event.content_index != 0:
            raise ClientEventError(
                f"The item has no content part {event.content_index}.", param="content_index"
            )
        if not 0 <= event.audio_end_ms <= item.sent_ms + TRUNCATE_TOLERANCE_MS:
            raise ClientEventError(
                f"audio_end_ms is {event.audio_end_ms:.0f}, but the item has "
                f"{item.sent_ms:.0f}ms of audio.",
                param="audio_end_ms",
            )
        audio_end_ms = int(event.audio_end_ms)
        item.truncate(audio_end_ms)
        self._emit(
            "conversation.item.truncated",
            item_id=event.item_id,
            content_index=event.content_index,
            audio_end_ms=audio_end_ms,
        )

    def _report_dropped(self, item_id: str, reason: str, response_id: str | None = None) -> None:
        self._parts.metrics.items_dropped.labels(reason).inc()
        self._emit("conversation.item.deleted", lane=response_id, item_id=item_id)
