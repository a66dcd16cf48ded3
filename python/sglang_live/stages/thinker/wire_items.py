"""What messages carry of a conversation: its items, made into HistoryItems, and its bound."""

from dataclasses import replace
from typing import cast

from sglang_live.core import AudioPart, HistoryItem, Role, TextPart
from sglang_live.kv.retention import RetentionConfig
from sglang_live.message_parts import WireAudio, WireItem, WireText
from sglang_live.messages import ThinkerRequest
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


def _part(part: WireText | WireAudio, frames: list[bytes]) -> TextPart | AudioPart:
    if isinstance(part, WireAudio):
        return AudioPart(wire.take(part.pcm, frames))
    return TextPart(part.text)


def retention_of(request: ThinkerRequest) -> RetentionConfig | None:
    if request.window_tokens is None:
        return None
    return RetentionConfig(
        sink_tokens=request.sink_tokens,
        window_tokens=request.window_tokens,
        slack_tokens=request.slack_tokens,
        within_tokens=request.within_tokens,
    )
