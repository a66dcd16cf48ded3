"""The conversation.item.* events of a client.

In: one event. Out: a changed Conversation and the server events that report it; or
ClientEventError and no change.
"""

from sglang_live.gateway.audio.codec import WireFormat
from sglang_live.gateway.call.conversation.assistant_item import AssistantItem
from sglang_live.gateway.call.conversation.changes import ConversationChanges
from sglang_live.gateway.call.outbox import Emit
from sglang_live.gateway.errors import ClientEventError
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.realtime.events import (
    ItemCreate,
    ItemDelete,
    ItemRetrieve,
    ItemTruncate,
)
from sglang_live.gateway.realtime.item_json import item_json
from sglang_live.gateway.realtime.item_schema import Input, build_item, place_in

# Clients compute the end from what they have played, rounded and sometimes a buffer too late. Some
# of them end at an error, so a small excess is accepted.
TRUNCATE_TOLERANCE_MS = 500


class ItemEvents:
    def __init__(self, parts: GatewayParts, changes: ConversationChanges, emit: Emit):
        self._parts = parts
        self._changes = changes
        self._conversation = changes.conversation
        self._emit = emit

    async def create(self, event: ItemCreate, audio_format: WireFormat) -> None:
        """Raises ClientEventError, or CapacityError while all conversations together are full."""
        self._conversation.check_insert(event.item.id, event.previous_item_id)
        config = self._parts.config
        given = Input(audio_format, config.inputs.max_append_bytes, config.model.sees)
        call_ids = self._conversation.call_ids
        item = await build_item(event.item, given, path="item", call_ids=call_ids)
        await self._parts.context_limit.check_item(item, f"item{place_in(event.item)}")
        # Meanwhile a response may have inserted or dropped an item.
        self._conversation.check_insert(event.item.id, event.previous_item_id)
        self._conversation.budget.check(item.size_bytes)
        self._changes.add(item, event.previous_item_id)

    def delete(self, event: ItemDelete) -> None:
        item = self._conversation.get(event.item_id, action="delete")
        self._conversation.delete(item)
        if item.answers in self._conversation.call_ids:
            self._conversation.call_ids[item.answers] = False
        self._emit("conversation.item.deleted", item_id=event.item_id)

    def retrieve(self, event: ItemRetrieve, audio_format: WireFormat) -> None:
        item = self._conversation.get(event.item_id, action="retrieve")
        self._emit("conversation.item.retrieved", item=item_json(item, audio_format))

    def truncate(self, event: ItemTruncate) -> None:
        item = self._conversation.get(event.item_id, action="truncate")
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
