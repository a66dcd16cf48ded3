"""When speculative turns may begin (policy/speculation.py): what turns have made, and for whom.

In: the events of turns, their playback, whether speculative turns became responses.
Owner: one Speculations per server; one TurnWork per turn of a conversation.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, Metric

from sglang_live.capacity.control import CapacityControl
from sglang_live.clock import Clock
from sglang_live.core import (
    FRAME_S,
    OUTPUT_RATE_HZ,
    AudioDelta,
    TranscriptDelta,
    TurnDone,
    TurnEvent,
    TurnRequest,
)
from sglang_live.policy.speculation import (
    Refusal,
    SpeculationConfig,
    SpeculationView,
    after_turn,
    refusal,
)

_BYTES_PER_S = 2 * OUTPUT_RATE_HZ


@dataclass(slots=True, eq=False)
class TurnWork:
    """
    withdrawn: None: a speculative turn of which it is not known yet.
    over: it makes nothing any more.
    """

    turn: TurnRequest
    withdrawn: bool | None = False
    over: bool = False
    _n_tokens: int = 0
    _n_frames: int | None = None
    _made_s: float = 0.0
    _heard_s: float = 0.0
    _speed: float = 1.0
    _at_s: float | None = None  # when it was heard up to there; None: it does not play

    def __post_init__(self) -> None:
        if self.turn.speculative:
            self.withdrawn = None

    @property
    def complete(self) -> bool:
        """Whether its TurnDone has come."""
        return self._n_frames is not None

    @property
    def n_steps(self) -> int:
        n_frames = round(self._made_s / FRAME_S) if self._n_frames is None else self._n_frames
        return 1 + self._n_tokens + n_frames

    def made(self, event: TurnEvent) -> None:
        match event:
            case TranscriptDelta():
                self._n_tokens = event.n_tokens
            case AudioDelta():
                self._made_s += len(event.pcm) / _BYTES_PER_S
            case TurnDone():
                self._n_tokens = event.usage.output_text_tokens
                self._n_frames = event.n_frames

    def heard(self, heard_s: float, playing: bool, now_s: float, speed: float = 1.0) -> None:
        self._heard_s, self._speed = heard_s, speed
        self._at_s = now_s if playing else None

    def is_urgent(self, now_s: float, safe_s: float) -> bool:
        if self.over or not self.turn.wants_audio:
            return False
        played_s = 0.0 if self._at_s is None else now_s - self._at_s
        left_s = (self._made_s - self._heard_s) / self._speed - played_s
        return self.withdrawn is None or left_s < safe_s


class Speculations:
    """
    Attributes:
        left: steps that speculative turns may still waste, of all sessions.
        n_useful, n_withdrawn: steps of all turns so far.
    """

    def __init__(self, capacity: CapacityControl, clock: Clock):
        self.config = SpeculationConfig()
        self._capacity = capacity
        self._clock = clock
        self.left = self.config.server_burst
        self.n_useful = 0
        self.n_withdrawn = 0

    def refusal(self, own: "SessionSpeculation", works: Iterable[TurnWork]) -> Refusal:
        """Why none may begin now; "" if one may. works: the latest turn of each session."""
        now_s, capacity = self._clock.now_s(), self._capacity.report()
        view = SpeculationView(
            n_more=capacity.n_more,
            n_sessions=capacity.n_sessions,
            n_urgent=sum(work.is_urgent(now_s, self.config.safe_s) for work in works),
            session_left=own.left,
            server_left=self.left,
        )
        return refusal(view, self.config)

    def count(self, n_steps: int, *, withdrawn: bool) -> None:
        if withdrawn:
            self.n_withdrawn += n_steps
        else:
            self.n_useful += n_steps
        share, burst = self.config.waste_share, self.config.server_burst
        self.left = after_turn(self.left, n_steps, withdrawn=withdrawn, share=share, burst=burst)

    def collect(self) -> Iterator[Metric]:
        """For a prometheus_client registry."""
        steps = CounterMetricFamily(
            "sglang_live_turn_steps",
            "Prefills, tokens and codec frames of turns of conversations, by outcome.",
            labels=("outcome",),
        )
        steps.add_metric(["useful"], self.n_useful)
        steps.add_metric(["withdrawn"], self.n_withdrawn)
        yield steps


class SessionSpeculation:
    """
    Attributes:
        left: steps that speculative turns of this session may still waste.
        work: of the latest turn. None: there was none.
    """

    def __init__(self, speculations: Speculations):
        self._all = speculations
        self.left = speculations.config.session_burst
        self.work: TurnWork | None = None

    def begin(self, turn: TurnRequest) -> TurnWork:
        self.end(confirmed=False)
        self.work = TurnWork(turn)
        return self.work

    @property
    def is_open(self) -> bool:
        """Whether there is a speculative turn that may become the response."""
        return self.work is not None and self.work.withdrawn is None

    def end(self, *, confirmed: bool) -> TurnWork | None:
        """The speculative turn has become the response, or never will. Returns it; None if there
        is none of which that is not known yet."""
        work = self.work
        if work is None or work.withdrawn is not None:
            return None
        work.withdrawn = not confirmed
        if work.over:
            self._count(work)
        return work

    def over(self, work: TurnWork) -> None:
        """A turn makes nothing any more."""
        work.over = True
        if work.withdrawn is not None:
            self._count(work)

    def _count(self, work: TurnWork) -> None:
        config, n_steps, withdrawn = self._all.config, work.n_steps, bool(work.withdrawn)
        self._all.count(n_steps, withdrawn=withdrawn)
        share, burst = config.waste_share, config.session_burst
        self.left = after_turn(self.left, n_steps, withdrawn=withdrawn, share=share, burst=burst)
