"""Function call of the model, as an item of the conversation.

Owner: the Conversation that holds it. Text and function calls of a turn are several items but one
history item: the first of the items represents it, the others have no history. If the first one
was truncated or deleted, a function call is in the history as text of its own.
"""

from typing import Any

from sglang_live.core import HistoryItem
from sglang_live.gateway.audio.codec import WireFormat
from sglang_live.gateway.ids import new_id
from sglang_live.gateway.realtime.conversation.items import (
    Item,
    Status,
    call_as_text,
    item_to_wire,
)
from sglang_live.gateway.tools import FunctionCall


class FunctionCallItem(Item):
    """
    Args:
        turn_item: history item of the whole turn.
        carrier: item that represents it; None: this one.
    """

    def __init__(self, call: FunctionCall, turn_item: HistoryItem, carrier: Item | None):
        self.id, self.call_id, self.call = new_id("item"), new_id("call"), call
        self.status: Status = "in_progress"
        self._turn_item, self._carrier = turn_item, carrier
        self._as_text = call_as_text(call.name, call.arguments)

    def to_json(self, audio_format: WireFormat | None = None) -> dict[str, Any]:
        arguments = self.call.arguments if self.status == "completed" else ""
        fields = {"name": self.call.name, "call_id": self.call_id, "arguments": arguments}
        return item_to_wire(self, "function_call", self.status, **fields)

    def history(self) -> HistoryItem | None:
        if self._carrier is None:
            return self._turn_item
        carried = None if self._carrier.has_left else self._carrier.history()
        is_whole = carried is not None and carried.token_ids == self._turn_item.token_ids
        return None if is_whole else self._as_text

    @property
    def carried_by(self) -> Item | None:
        return self._carrier

    @property
    def size_bytes(self) -> int:
        return len(self.call.name) + len(self.call.arguments)
