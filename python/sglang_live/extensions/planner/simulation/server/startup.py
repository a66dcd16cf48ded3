"""Withholds the first audio of a response, as orchestrator/startup_delay.py does on an event loop.

The delay, and the lateness from which it follows, are policy/startup_delay.py's.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang_live.extensions.planner.simulation.events import Events
from sglang_live.policy.startup_delay import (
    Beginning,
    StartupDelayConfig,
    lateness_s,
    startup_delay_s,
)

# As orchestrator/startup_delay.py.
_BEGINNING_S = 3.0
_N_ENDED = 64


@dataclass(slots=True, eq=False)
class _Response:
    """
    pass_on: called with the duration of each chunk that may leave. end: called behind the last one.
    held: chunks that are withheld.
    """

    n_others: int
    pass_on: Callable[[float], None]
    end: Callable[[], None] | None = None
    arrivals: list[tuple[float, float]] = field(default_factory=list)
    held: list[float] | None = field(default_factory=list)


class StartupDelays:
    def __init__(self, events: Events, config: StartupDelayConfig | None = None):
        self._events = events
        self._config = config or StartupDelayConfig()
        self._ended: deque[Beginning] = deque(maxlen=_N_ENDED)
        self._open: dict[Any, _Response] = {}

    def came(self, key: Any, audio_s: float, pass_on: Callable[[float], None]) -> None:
        """A chunk of a response has come from the vocoder."""
        now_s = self._events.now_s()
        response = self._open.get(key)
        if response is None:
            response = self._open[key] = _Response(len(self._open), pass_on)
            self._events.after(self._delay_s(response.n_others), lambda: self._release(response))
        arrivals = response.arrivals
        if not arrivals or now_s - arrivals[0][0] < _BEGINNING_S:
            arrivals.append((now_s, audio_s))
        if response.held is None:
            pass_on(audio_s)
            return
        response.held.append(audio_s)
        if sum(response.held) - (now_s - arrivals[0][0]) >= self._config.safe_s:
            self._release(response)

    def ended(self, key: Any, end: Callable[[], None]) -> None:
        """All audio of a response has come."""
        response = self._open.pop(key, None)
        if response is not None:
            self._ended.append(self._beginning(response, ended=True))
            self._release(response)
        end()

    def dropped(self, key: Any) -> None:
        """A response was interrupted."""
        response = self._open.pop(key, None)
        if response is not None:
            response.held = None

    def _release(self, response: _Response) -> None:
        held = response.held
        response.held = None
        for audio_s in held or ():
            response.pass_on(audio_s)

    def _delay_s(self, n_others: int) -> float:
        playing = [self._beginning(one) for one in self._open.values() if one.arrivals]
        now_s = self._events.now_s()
        return startup_delay_s([*self._ended, *playing], n_others, now_s, self._config)

    @staticmethod
    def _beginning(response: _Response, *, ended: bool = False) -> Beginning:
        arrivals = response.arrivals
        return Beginning(arrivals[0][0], response.n_others, lateness_s(arrivals), ended)
