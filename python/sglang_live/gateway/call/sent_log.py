"""What a client was sent last, for the case that its socket is lost.

In: frames, as they are sent; how far the client had got. Out: the frames that it lacks.
Owner: one SentLog per resumable call, in its outbox. Bounded: the oldest frames leave.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from sglang_live.gateway.errors import ClientEventError
from sglang_live.interaction.playback import PlaybackClock

OnSent = Callable[[], None]

_EPSILON_S = 1e-6


@dataclass(frozen=True, slots=True)
class SentFrame:
    """
    number: of its event in the call.
    on_sent: called when the network has taken it.
    lane: id of its response; None: it belongs to no lane.
    taken: the network has taken it before, for a socket that is lost.
    repeats: whether it is sent again to a client that lacks it.
    """

    data: bytes
    number: int
    on_sent: OnSent | None
    lane: str | None
    audio_s: float
    taken: bool = False
    repeats: bool = True


@dataclass(frozen=True, slots=True)
class Missed:
    """
    frames: to be sent, each with the seconds at its beginning that were heard.
    kept: that the client has.
    heard_s: by response, what the client has heard; of others nothing is known.
    """

    frames: list[tuple[SentFrame, float]]
    kept: list[SentFrame]
    heard_s: dict[str, float]


class SentLog:
    def __init__(self, share_bytes: Callable[[], int]):
        """share_bytes: how much it may hold now."""
        self._share_bytes = share_bytes
        self._frames: deque[SentFrame] = deque()
        self._n_bytes = 0

    def begin(self, frame: SentFrame) -> None:
        """The frame is being sent; whether the client gets it is unknown."""
        self._frames.append(frame)
        self._n_bytes += len(frame.data)
        limit = self._share_bytes()
        while self._n_bytes > limit:
            self._n_bytes -= len(self._frames.popleft().data)

    def confirm(self) -> None:
        """The network has taken the frame."""
        if self._frames:
            self._frames[-1] = replace(self._frames[-1], on_sent=None, taken=True)

    def reset(self, kept: Iterable[SentFrame]) -> None:
        self._frames = deque(kept)
        self._n_bytes = sum(len(frame.data) for frame in self._frames)

    def missed(
        self,
        number: int | None,
        heard_s: float | None,
        clock_of: Callable[[str], PlaybackClock | None],
        now_s: float,
    ) -> Missed:
        """What a client lacks.

        Args:
            number: of the last event that it got; None: it has got all up to the audio it heard.
            heard_s: what it has heard of the newest response whose audio it has got; None: what
                the playback clock says.
            clock_of: playback of a response, by lane; None: nothing of it can be heard any more.
        Raises:
            ClientEventError: something that it lacks is not kept.
        """
        n_got = len(self._frames) if number is None else self._index(number) + 1
        if number is not None and not (last := self._frames[n_got - 1]).taken:
            # The socket was lost before it had told that the network took this frame.
            self.confirm()
            if last.on_sent:
                last.on_sent()
        frames = list(self._frames)
        lanes = [frame.lane for frame in frames[:n_got] if frame.audio_s and frame.lane]
        later = {frame.lane for frame in frames[n_got:] if frame.audio_s and frame.lane}
        heard = dict.fromkeys(later - {*lanes}, 0.0)
        n_past = 0  # frames up to the end of the audio that was heard
        cuts: dict[int, float] = {}  # by frame with audio of the newest response: what was heard
        if lanes and (clock := clock_of(lanes[-1])):
            newest = lanes[-1]
            to_s = clock.possible_s(clock.heard_s(now_s) if heard_s is None else heard_s, now_s)
            heard[newest] = to_s
            if to_s:
                heard |= dict.fromkeys({*lanes} - {newest}, float("inf"))
            audio = [n for n, frame in enumerate(frames) if frame.audio_s and frame.lane == newest]
            at_s = clock.sent_s - sum(frames[n].audio_s for n in audio if frames[n].taken)
            if at_s > to_s + _EPSILON_S:
                raise not_kept("heard_ms", "audio from there on")
            for n in audio:
                cuts[n] = max(0.0, to_s - at_s)
                at_s += frames[n].audio_s
                n_past = n + 1 if at_s <= to_s + _EPSILON_S else n_past
        if number is None:
            n_got = n_past
        again, kept = [], []
        for n, frame in enumerate(frames):
            cut_s = cuts.get(n, 0.0)
            if n in cuts:
                is_there = cut_s >= frame.audio_s - _EPSILON_S
            else:  # the client heard older responses before
                is_there = n < n_got or (number is None and frame.audio_s > 0)
            if is_there:
                kept.append(frame)
            elif frame.repeats:
                again.append((frame, cut_s))
        return Missed(again, kept, heard)

    def _index(self, number: int) -> int:
        for n, frame in enumerate(self._frames):
            if frame.number == number:
                return n
        raise not_kept("after", "events after that one")


def not_kept(param: str, what: str) -> ClientEventError:
    return ClientEventError(
        f"The server does not have all the {what} any more.", code="resume_too_late", param=param
    )
