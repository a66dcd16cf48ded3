"""Audio of the conversations that the stage holds, in little memory.

A session is built anew from its items, which is rare: audio of older ones is packed, in a thread.
Owner: one Packing per thinker stage.
"""

import asyncio
from collections.abc import Mapping

from sglang_live.core import AudioPart, HistoryItem

# Audio of a session that is not packed; with more, all but the newest item's is.
_RAW_S = 10.0


class Packing:
    """items: by session and key; the sessions' values are changed."""

    def __init__(self, items: Mapping[str, dict[str, HistoryItem]]) -> None:
        self._items = items
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(self, session_id: str) -> None:
        """To be called after a turn."""
        held = self._items.get(session_id, {}).values()
        raw = [item for item in held if item.raw_s]
        if session_id not in self._tasks and sum(item.raw_s for item in raw) > _RAW_S:
            task = asyncio.create_task(self._pack(session_id, raw[:-1]), name="pack audio")
            self._tasks[session_id] = task

    async def _pack(self, session_id: str, older: list[HistoryItem]) -> None:
        try:
            packed = await asyncio.to_thread(
                lambda: [item.with_audio(AudioPart.packed) for item in older]
            )
        finally:
            del self._tasks[session_id]
        held = self._items.get(session_id, {})
        held |= {item.key: item for item in packed if item.key in held}
