"""The default conversation of one session: its items, in order.

Owner: one Conversation per connection. It emits no events; the code that changes it does.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from sglang_live.core import AudioPart
from sglang_live.errors import CapacityError
from sglang_live.gateway.call.conversation.assistant_item import AssistantItem
from sglang_live.gateway.call.conversation.items import FunctionCallItem, Item
from sglang_live.gateway.errors import ClientEventError
from sglang_live.ids import new_id

# Clients retrieve the item that they have just truncated, not older ones.
_ASSISTANT_ITEMS_WITH_AUDIO = 2
# Complete sounds, of both sides, that are not packed: clients retrieve them and a failed turn sends
# them again.
_RAW_SOUNDS = 2
# Hours of speech; the limit is for clients that create items in a loop.
_MAX_ITEMS = 4096
# A full conversation drops a quarter at once: after each drop, the model's session recomputes its
# prefix.
KEEP_WHEN_FULL = 0.75
# Ids that are kept of function calls: an output may come after its call has left the conversation.
_MAX_CALL_IDS = 4096
ROOT = "root"


@dataclass(slots=True)
class ItemBudget:
    """Limit on the memory of the items of all conversations together.

    Owner: one ItemBudget per process. Each conversation has its own limit too; without this one,
    many full conversations would exhaust the machine's memory.
    """

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


class Conversation:
    """
    promised_id: id reserved for an item that is not inserted yet, or None.
    call_ids: whether a function call has an output, by its id; also of those that have left,
        oldest first.
    """

    promised_id: str | None = None

    def __init__(self, max_bytes: int, budget: ItemBudget):
        self.id = new_id("conv")
        self.call_ids: dict[str, bool] = {}
        self._max_bytes = max_bytes
        self.budget = budget
        self._items: list[Item] = []
        self._by_id: dict[str, Item] = {}
        # At insertion, and since it was packed: assistant items grow within limits.
        self._bytes_by_id: dict[str, int] = {}
        self._total_bytes = 0
        self._unpacked: list[Item] = []  # those with sound that is not, in order of insertion
        self._packing: asyncio.Task[None] | None = None

    def __contains__(self, item_id: str) -> bool:
        return item_id in self._by_id

    @property
    def items(self) -> tuple[Item, ...]:
        """All items in order, as a snapshot."""
        return tuple(self._items)

    @property
    def last_id(self) -> str | None:
        return self._items[-1].id if self._items else None

    def get(self, item_id: str, *, action: str) -> Item:
        """The item. Raises ClientEventError with the protocol's code for this action."""
        item = self._by_id.get(item_id)
        if item is None:
            raise ClientEventError(
                f"Cannot {action} item: the item with id '{item_id}' does not exist.",
                code=f"item_{action}_invalid_item_id",
                param="item_id",
            )
        return item

    def check_insert(self, item_id: str | None, after_id: str | None) -> None:
        """Raises ClientEventError for a duplicate id or an unknown place."""
        if item_id is not None and item_id in (*self._by_id, self.promised_id):
            raise ClientEventError(
                f"Error adding item: an item with id '{item_id}' already exists.",
                code="item_create_duplicate_item_id",
                param="item.id",
            )
        if after_id not in (None, ROOT) and after_id not in self._by_id:
            raise ClientEventError(
                f"Error adding item: the previous item with id '{after_id}' does not exist.",
                code="item_create_invalid_previous_item_id",
                param="previous_item_id",
            )

    def insert(self, item: Item, after_id: str | None = None) -> str | None:
        """Add an item after after_id, first for ROOT, last for None or an item that has left.

        Returns:
            Id of the item before it, None if it is the first.
        """
        assert item.id not in self._by_id
        if after_id == ROOT:
            at = 0
        elif after_id in self._by_id:
            at = self._items.index(self._by_id[after_id]) + 1
        else:
            at = len(self._items)
        self._items.insert(at, item)
        self._by_id[item.id] = item
        self._count(item, item.size_bytes)
        if item.call_id is not None:
            self.remember_call(item.call_id)
        if item.answers in self.call_ids:
            self.call_ids[item.answers] = True
        if isinstance(item, AssistantItem):
            self._drop_old_audio()
        if item.has_sound:
            self._unpacked.append(item)
        if self._packing is None and self._to_pack() is not None:
            self._packing = asyncio.create_task(self._pack(), name="pack audio")
        return self._items[at - 1].id if at else None

    def id_before(self, item: Item) -> str | None:
        at = self._items.index(item)
        return self._items[at - 1].id if at else None

    def remember_call(self, call_id: str) -> None:
        """Accept an output for this call from now on."""
        self.call_ids.setdefault(call_id, False)
        if len(self.call_ids) > _MAX_CALL_IDS:
            del self.call_ids[next(iter(self.call_ids))]

    def delete(self, item: Item) -> None:
        item.has_left = True
        del self._by_id[item.id]
        self._count(item, 0)
        del self._bytes_by_id[item.id]
        self._items.remove(item)

    def drop_oldest_if_full(self) -> list[str]:
        """Drop the oldest items if the conversation is full. Returns their ids."""
        alone = len(self._items) <= 1
        if not self._over(self._max_bytes, _MAX_ITEMS) and (alone or not self.budget.over):
            return []
        dropped = []
        max_bytes = self._max_bytes * KEEP_WHEN_FULL
        if self.budget.over:
            max_bytes = min(max_bytes, self._total_bytes * KEEP_WHEN_FULL)
        while self._over(max_bytes, _MAX_ITEMS * KEEP_WHEN_FULL):
            dropped.append(self._items[0].id)
            self.delete(self._items[0])
        return dropped

    def close(self) -> None:
        """Release the memory of all items. Safe to call twice."""
        if self._packing is not None:
            self._packing.cancel()
        for item in self.items:
            self.delete(item)

    def seen_as(self, keys: Collection[str]) -> list[Item]:
        """The items whose last history key is one of these, in order."""
        keys = frozenset(keys)
        seen = ((item, item.pieces()) for item in self._items)
        return [item for item, pieces in seen if pieces and pieces[-1].key in keys]

    def calls_with(self, item: Item) -> list[Item]:
        """The function calls of the same turn that this item represents in the history."""
        if (seen := item.history()) is None or not isinstance(
            item, AssistantItem | FunctionCallItem
        ):
            return []
        calls = [call for call in self._items if isinstance(call, FunctionCallItem)]
        carried: list[Item] = [
            call for call in calls if call.carried_by is item and call.history() is None
        ]
        return carried if seen.token_ids is not None else []

    def _over(self, max_bytes: float, max_items: float) -> bool:
        # The newest item stays, however large: it is the user's last utterance.
        n_items = len(self._items)
        return n_items > 1 and (self._total_bytes > max_bytes or n_items > max_items)

    def _drop_old_audio(self) -> None:
        items = [item for item in self._items if isinstance(item, AssistantItem)]
        for item in items[:-_ASSISTANT_ITEMS_WITH_AUDIO]:
            if item.audio is not None:
                item.audio = None
                self._count(item, item.size_bytes)

    def _count(self, item: Item, n_bytes: int) -> None:
        """The item has this size now."""
        more = n_bytes - self._bytes_by_id.get(item.id, 0)
        self._bytes_by_id[item.id] = n_bytes
        self._total_bytes += more
        self.budget.take(more)

    def _to_pack(self) -> Item | None:
        self._unpacked = [i for i in self._unpacked if i.has_sound and not i.has_left]
        raw = [item for item in self._unpacked if item.is_raw]
        return raw[0] if len(raw) > _RAW_SOUNDS else None

    async def _pack(self) -> None:
        """Pack older sounds, one item after another, in a thread."""
        try:
            while (item := self._to_pack()) is not None:
                packed = await asyncio.to_thread(_packed, item.raw_sounds())
                if item.is_raw and not item.has_left:
                    item.keep_packed(packed)
                    self._count(item, item.size_bytes)
        finally:
            self._packing = None


def _packed(sounds: list[AudioPart]) -> list[AudioPart]:
    return [sound.packed() for sound in sounds]
