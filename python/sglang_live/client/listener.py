"""Listener: what a caller's device does with a reply when the server hears the user speak.

In: the replies that play. Out: `conversation.item.truncate` with what was heard, and
`playback.ack` every half second if asked for. Owner: one per RealtimeClient.
"""

import itertools
from collections.abc import Callable, Iterable

from sglang_live.client.reply import Reply
from sglang_live.clock import Clock

Event = dict[str, object]

ACK_EVERY_S = 0.5
# Errors that answer these events are about playback and say nothing of the turn.
SIDE_EVENT = "playback_"
_MS_PER_S = 1000


class Listener:
    def __init__(self, clock: Clock, post: Callable[[Event], None], truncate: bool):
        self._clock = clock
        self._post = post
        self._truncate = truncate
        self._acked_ms: dict[str, int] = {}
        self._numbers = itertools.count(1)

    def on_speech_started(self, replies: Iterable[Reply]) -> None:
        """Drop what was not played yet, as every client of the protocol does."""
        for reply in replies:
            if not reply.playing:
                continue
            reply.flush(self._clock.now_s())
            if self._truncate and reply.item_id is not None:
                self._tell(
                    reply, "conversation.item.truncate", content_index=0, audio_end_ms=_ms(reply)
                )

    async def keep_acking(self, replies: Callable[[], Iterable[Reply]]) -> None:
        while True:
            await self._clock.sleep(ACK_EVERY_S)
            for reply in replies():
                self._ack(reply)

    def _ack(self, reply: Reply) -> None:
        heard_ms = _ms(reply)
        if reply.item_id is None or heard_ms == self._acked_ms.get(reply.item_id, 0):
            return
        self._acked_ms[reply.item_id] = heard_ms
        self._tell(reply, "playback.ack", audio_end_ms=heard_ms)

    def _tell(self, reply: Reply, kind: str, **fields) -> None:
        event_id = f"{SIDE_EVENT}{next(self._numbers)}"
        self._post({"type": kind, "event_id": event_id, "item_id": reply.item_id, **fields})


def _ms(reply: Reply) -> int:
    return int(reply.playback.heard_s * _MS_PER_S)
