"""The events of a Live session, on the socket of its client and on those of its sidebands.

In: server events, the user's audio. Out: the events in every outbox; times of audio, and the user's
audio, in those of sidebands alone.
Owner: one Broadcast per session.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang_live.core import OUTPUT_RATE_HZ
from sglang_live.errors import CapacityError
from sglang_live.gateway.audio.codec import WireDecoder, WireFormat, encode_base64
from sglang_live.gateway.call.outbox import Outbox

MOST_SIDEBANDS = 4


class Broadcast:
    """The outbox of a session's client, and those of its sidebands."""

    def __init__(self, outbox: Outbox):
        self._outbox = outbox
        self._others: list[Outbox] = []
        self._decoder: WireDecoder | None = None

    def emit(
        self,
        event_type: str,
        /,
        on_sent: Callable[[], None] | None = None,
        numbered: bool = True,
        aside: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        """See Emit (call/outbox.py). aside: fields that sidebands get beside the others."""
        self._outbox.emit(event_type, on_sent=on_sent, numbered=numbered, **fields)
        for other in self._others:
            other.emit(event_type, numbered=numbered, **fields, **(aside or {}))

    def emit_aside(self, event_type: str, /, **fields: Any) -> None:
        """An event that sidebands get alone, without a number."""
        for other in self._others:
            other.emit(event_type, numbered=False, **fields)

    def reflect(self, raw: bytes, form: WireFormat) -> None:
        """Show the user's audio to sidebands, as int16 at 24 kHz."""
        if not self._others:
            self._decoder = None
            return
        self._decoder = self._decoder or WireDecoder(form, OUTPUT_RATE_HZ)
        audio = encode_base64(self._decoder.push(raw).astype("<i2", copy=False).tobytes())
        self.emit_aside("session.input_audio.append", audio=audio)

    def check_room(self) -> None:
        """Raises CapacityError if there are too many sidebands."""
        if len(self._others) >= MOST_SIDEBANDS:
            raise CapacityError(f"A session has at most {MOST_SIDEBANDS} sidebands.")

    @contextmanager
    def to(self, other: Outbox) -> Iterator[None]:
        self._others.append(other)
        try:
            yield
        finally:
            self._others.remove(other)
