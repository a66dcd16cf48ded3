"""A call that goes on over another socket, after its own was lost.

In: a token, a socket that brings it, how far its client had got. Out: that socket for the call's
link, and the events that the client lacks in its outbox.
Owner: one ResumableCalls per process, one Resumption per resumable call.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from secrets import token_urlsafe
from typing import TYPE_CHECKING, Any

from sglang_live.clock import Clock
from sglang_live.errors import BadInputError
from sglang_live.gateway.call.outbox import Outbox
from sglang_live.gateway.call.sent_log import Missed, SentFrame, SentLog
from sglang_live.gateway.call.wire import Wire

if TYPE_CHECKING:  # its parts have the resumable calls
    from sglang_live.gateway.call.call import Call

_PREFIX = "rt_"
_RANDOM_BYTES = 24
_MOST_CHARACTERS = 200


def session_of(token: str) -> str:
    """The session that it is for. "": it is no token."""
    name, dot, _ = token.removeprefix(_PREFIX).partition(".")
    return name if dot and token.startswith(_PREFIX) and len(token) < _MOST_CHARACTERS else ""


class ResumeTokenError(BadInputError):
    code = "invalid_resume_token"

    def __init__(self) -> None:
        super().__init__(
            "No session can be resumed with this token: there is none, it is over, or the token "
            "was used or belongs to another key."
        )


class ResumableCalls:
    """By token. log_bytes: of what one call has sent. log_bytes_of_all: of all calls together."""

    def __init__(self, log_bytes: int, log_bytes_of_all: int):
        self._log_bytes = log_bytes
        self._log_bytes_of_all = log_bytes_of_all
        self._calls: dict[str, Resumption] = {}

    def find(self, token: str, owner: str) -> "Resumption | None":
        """None: it is no token of this process. Raises ResumeTokenError: it is another owner's."""
        # The time of a dictionary lookup does not depend on how much of a token is right.
        call = self._calls.get(token)
        if call is not None and call.owner != owner:
            raise ResumeTokenError
        return call

    def add(self, call: "Resumption") -> str:
        """Returns a new token."""
        token = f"{_PREFIX}{call.session_id}.{token_urlsafe(_RANDOM_BYTES)}"
        self._calls[token] = call
        return token

    def remove(self, token: str) -> None:
        self._calls.pop(token, None)

    def share_bytes(self) -> int:
        """Of a log. A call that comes late has as much as one that came early."""
        return min(self._log_bytes, self._log_bytes_of_all // max(1, len(self._calls)))


@dataclass(eq=False, slots=True)
class Arrival:
    """
    wire: a socket that takes a call over.
    missed: by its client.
    left: set when the call does not need the socket any more.
    """

    wire: Wire
    missed: Missed
    left: asyncio.Event = field(default_factory=asyncio.Event)


class Resumption:
    def __init__(
        self,
        calls: ResumableCalls,
        call: "Call",
        outbox: Outbox,
        clock: Clock,
        owner: str,
        *,
        audio_of: Callable[[bytes], bytes],
        with_audio: Callable[[bytes, bytes, str], bytes],
        welcome: Callable[[int], tuple[str, dict[str, Any]]],
        on_token: Callable[[str], None] = lambda token: None,
        is_here: Callable[[], Awaitable[bool]] | None = None,
        hand_over: Callable[[], Awaitable[bool]] | None = None,
    ):
        """
        Args:
            owner: of the client's key; with another key the call cannot be resumed.
            audio_of: audio of a server event. with_audio: the event with other audio, another id.
            welcome: type and fields of the event behind those that the client lacks. Its argument
                is the number of client events that were read in this call.
            on_token: called with each new token.
            is_here: whether the call is still this gateway's; None: it always is.
            hand_over: lets go of the call for another gateway, and returns whether one can have
                it; None: none can.
        """
        self.owner = owner
        self.session_id = call.session_id
        self._calls = calls
        self._call = call
        self._outbox = outbox
        self._clock = clock
        self._audio_of = audio_of
        self._with_audio = with_audio
        self._welcome = welcome
        self._on_token = on_token
        self._is_here = is_here
        self._hand_over = hand_over
        self._renew_token()
        self._arrival: Arrival | None = None
        self._has_arrived = asyncio.Event()
        outbox.sent_log = SentLog(calls.share_bytes)

    async def check_here(self) -> None:
        """Raises ResumeTokenError: the call has gone on at another gateway."""
        if self._is_here is not None and not await self._is_here():
            raise ResumeTokenError

    async def hand_over(self) -> bool:
        """Returns whether another gateway can have the call, which then is over here."""
        return self._hand_over is not None and await self._hand_over()

    def join(self, wire: Wire, after: str | None, heard_ms: float | None) -> Arrival:
        """Continue the call over this socket.

        Args:
            after: id of the last event that the client got; None: it has got all up to the audio
                that it heard.
            heard_ms: what it has heard of the newest item whose audio it has got; None: what the
                playback clock says.
        Raises:
            ClientEventError: what the client lacks is not kept. Nothing has changed.
        """
        heard_s = None if heard_ms is None else heard_ms / 1000
        audible = self._call.audible
        missed = self._outbox.missed(after, heard_s, audible.clock_of, self._clock.now_s())
        self._calls.remove(self.token)
        self._renew_token()
        self._arrival = Arrival(wire, missed)
        self._has_arrived.set()
        self._outbox.stop()
        return self._arrival

    def _renew_token(self) -> None:
        self.token = self._calls.add(self)
        self._on_token(self.token)

    def close(self) -> None:
        """The call cannot be resumed any more."""
        self._calls.remove(self.token)
        self._outbox.sent_log = None
        if self._arrival is not None and self.has_arrival:
            self._arrival.left.set()

    @property
    def has_arrival(self) -> bool:
        return self._has_arrived.is_set()

    async def arrival(self) -> Arrival:
        """Wait for the socket that takes the call over; until then its client is away."""
        self._call.leave()
        await self._has_arrived.wait()
        self._has_arrived.clear()
        assert self._arrival is not None
        return self._arrival

    def go_on(self, arrival: Arrival, n_read: int) -> None:
        """Send what its client lacks, then all else. n_read: events of the client, so far."""
        missed = arrival.missed
        self._call.come_back(missed.heard_s)
        assert self._outbox.sent_log is not None
        self._outbox.sent_log.reset(missed.kept)
        again = [self._again(frame, heard_s) for frame, heard_s in missed.frames]
        kind, fields = self._welcome(n_read)
        self._outbox.restart(arrival.wire.send, again, kind, **fields)

    def _again(self, frame: SentFrame, heard_s: float) -> SentFrame:
        """The frame without the audio at its beginning that was heard."""
        if not frame.taken or not frame.audio_s or frame.lane is None:
            return frame
        audio, left_s = self._audio_of(frame.data), frame.audio_s - heard_s
        n_samples = round(len(audio) // 2 * heard_s / frame.audio_s)
        audio = audio[2 * n_samples :]
        # An id of its own: a client drops events that it has had.
        number, event_id = self._outbox.next_number()
        data = self._with_audio(frame.data, audio, event_id)
        on_sent = partial(self._call.audible.sent_again, frame.lane, audio)
        return replace(frame, data=data, number=number, audio_s=left_s, on_sent=on_sent)
