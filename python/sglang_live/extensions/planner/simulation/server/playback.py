"""Playback of one response: as the gateway reports it, and as the user hears it.

The gateway's clock (interaction/playback.py), the reports about it (TurnControl) and the client's
clock are the server's and the client's own classes. When a report is due is as in
interaction/monitor.py, which runs on an event loop.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_live.extensions.planner.simulation.engine.engine import Engine
from sglang_live.extensions.planner.simulation.events import Events
from sglang_live.interaction.monitor import REPORT_TOLERANCE_S
from sglang_live.interaction.playback import PlaybackClock
from sglang_live.messages import HeardOfMany
from sglang_live.orchestrator.turn_control import REPORT_EVERY_S
from sglang_live.stages.engine_link import FLUSH_EVERY_S

Report = Callable[[float, bool], None]


class GatewayPlayback:
    """What the gateway assumes of a response's playback.

    Args:
        report: called with the seconds heard, and whether playback advances, when the stages'
            estimate is wrong.
    """

    def __init__(self, events: Events, report: Report):
        self._events = events
        self._report = report
        self._heard_s = 0.0
        self._plays = False
        self._at_s = events.now_s()
        self._wakes_s = math.inf
        self.clock = PlaybackClock()
        self.is_over = False

    def sent(self, audio_s: float) -> None:
        self.clock.sent(audio_s, self._events.now_s())
        self._update()

    def finish(self) -> None:
        """All its audio was sent."""
        self.clock.finish(self._events.now_s())
        self._update()

    def stop(self) -> float:
        """The user interrupts it, if it is audible. Returns the seconds that were heard."""
        self.is_over = True
        return self.clock.stop(self._events.now_s())

    def _update(self) -> None:
        if self.is_over:
            return
        now_s = self._events.now_s()
        heard_s, plays = self.clock.heard_s(now_s), self.clock.playing(now_s)
        assumed_s = self._heard_s + (now_s - self._at_s if self._plays else 0.0)
        is_old = self.clock.sent_s > 0 and now_s >= self._at_s + REPORT_EVERY_S
        if plays != self._plays or abs(assumed_s - heard_s) > REPORT_TOLERANCE_S or is_old:
            self._heard_s = heard_s
            self._plays = plays
            self._at_s = now_s
            self._report(heard_s, plays)
        if self.clock.over(now_s):
            self.is_over = True
            return
        due_s = self.clock.next_change_s(now_s)
        if self.clock.sent_s:
            due_s = min(math.inf if due_s is None else due_s, self._at_s + REPORT_EVERY_S)
        if due_s is not None and due_s < self._wakes_s:
            self._wakes_s = due_s
            self._events.at(due_s, self._wake)

    def _wake(self) -> None:
        self._wakes_s = math.inf
        self._update()


@dataclass(slots=True)
class HeardFeed:
    """As in stages/engine_link.py: the newest news of each request, in few messages.

    Attributes:
        delay_s: from the gateway to the engine.
    """

    events: Events
    engine: Engine
    delay_s: float
    _newest: dict[str, tuple[float, bool]] = field(default_factory=dict)
    _is_flushing: bool = False

    def put(self, rid: str, heard_s: float, advancing: bool) -> None:
        if self.engine.rounds is None:
            return
        self._newest[rid] = heard_s, advancing
        if not self._is_flushing:
            self._is_flushing = True
            self.events.after(self.delay_s, self._flush)

    def forget(self, rid: str) -> None:
        self._newest.pop(rid, None)

    def _flush(self) -> None:
        rounds = self.engine.rounds
        if not self._newest or rounds is None:
            self._is_flushing = False
            return
        newest = self._newest
        self._newest = {}
        heard_s, advancing = zip(*newest.values(), strict=True)
        news = HeardOfMany.of(list(newest), heard_s, advancing)
        self.engine.post(lambda: rounds.progress(news))
        self.events.after(FLUSH_EVERY_S, self._flush)
