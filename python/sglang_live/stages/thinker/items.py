"""The items of conversations that a thinker stage holds.

A session is built anew from its items, which is rare: audio of older ones is packed, in a thread.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from sglang_live.core import AudioPart, HistoryItem, ImagePart, Part, Role, TextPart, VideoPart
from sglang_live.messages import WireAudio, WireImage, WireItem, WireText, WireVideo
from sglang_live.sound.clip_form import ClipForm
from sglang_live.stages.transport import wire


def history_item(item: WireItem, frames: list[bytes]) -> HistoryItem:
    """frames: raw frames behind the message that carries the item."""
    return HistoryItem(
        key=item.key,
        role=cast(Role, item.role),
        parts=tuple(_part(part, frames) for part in item.parts),
        token_ids=None if item.token_ids is None else tuple(item.token_ids),
        opens=item.opens,
        closes=item.closes,
    )


def formed(item: HistoryItem, form: ClipForm) -> HistoryItem:
    """The item with its recordings in the form that the model hears."""
    parts = tuple(
        AudioPart(form.of_pcm(part.pcm, begins=item.opens, ends=item.closes))
        if isinstance(part, AudioPart)
        else part
        for part in item.parts
    )
    return replace(item, parts=parts)


def _part(part: WireText | WireAudio | WireImage | WireVideo, frames: list[bytes]) -> Part:
    match part:
        case WireAudio():
            return AudioPart(wire.take(part.pcm, frames))
        case WireImage():
            return ImagePart(wire.take(part.png, frames).tobytes(), part.width, part.height)
        case WireVideo():
            return VideoPart(wire.take(part.frames, frames))
        case WireText():
            return TextPart(part.text)


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
