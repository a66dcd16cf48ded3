"""Player: the user's device, which stops a response when the server detects the user's speech.

In: the responses that play. Out: `conversation.item.truncate` with the heard audio, and
`playback.ack` every half second if enabled. Owner: one per RealtimeClient.
"""

import itertools
from collections.abc import Callable, Iterable

from lab.load_client.response import Response
from sglang_live.clock import Clock

Event = dict[str, object]

ACK_EVERY_S = 0.5
# Prefix of event ids; errors about these events concern playback and do not fail the turn.
PLAYBACK_EVENT = "playback_"
_MS_PER_S = 1000


class Player:
    """Stops responses and reports their playback to the server.

    post: sends an event without waiting.
    truncate: whether the server is told how much of a stopped response was heard.
    """

    def __init__(self, clock: Clock, post: Callable[[Event], None], truncate: bool):
        self._clock = clock
        self._post = post
        self._truncate = truncate
        self._acked_ms: dict[str, int] = {}
        self._numbers = itertools.count(1)

    def on_speech_started(self, responses: Iterable[Response]) -> None:
        """Drop audio that was not played yet, as every client of the protocol does."""
        for response in responses:
            if not response.playing:
                continue
            response.flush(self._clock.now_s())
            if self._truncate and response.item_id is not None:
                heard_ms = _heard_ms(response)
                self._send(response, "conversation.item.truncate", heard_ms, content_index=0)

    async def keep_acking(self, responses: Callable[[], Iterable[Response]]) -> None:
        while True:
            await self._clock.sleep(ACK_EVERY_S)
            for response in responses():
                self._ack(response)

    def _ack(self, response: Response) -> None:
        heard_ms = _heard_ms(response)
        if response.item_id is None or heard_ms == self._acked_ms.get(response.item_id, 0):
            return
        self._acked_ms[response.item_id] = heard_ms
        self._send(response, "playback.ack", heard_ms)

    def _send(self, response: Response, kind: str, heard_ms: int, **fields: object) -> None:
        event_id = f"{PLAYBACK_EVENT}{next(self._numbers)}"
        self._post(
            {
                "type": kind,
                "event_id": event_id,
                "item_id": response.item_id,
                **fields,
                "audio_end_ms": heard_ms,
            }
        )


def _heard_ms(response: Response) -> int:
    return int(response.playback.heard_s * _MS_PER_S)
