"""Storms beside the simulated users, as voice_load sends them.

Each message is one item of a new session, and is answered in text. Waves come until the users have
left.
"""

from collections.abc import Callable

from sglang_live.extensions.planner.simulation.load.rows import StormRow
from sglang_live.extensions.planner.simulation.load.storm import MAX_OUTPUT_TOKENS, StormSpec
from sglang_live.extensions.planner.simulation.server.server import Server
from sglang_live.extensions.planner.simulation.turn_record import MS_PER_S, TurnRecord


class Storm:
    """
    Args:
        is_over: whether all users have left.
    Attributes:
        rows: of all messages, once the simulation is over.
    """

    def __init__(self, spec: StormSpec, server: Server, is_over: Callable[[], bool]):
        self._spec = spec
        self._server = server
        self._is_over = is_over
        self._events = server.events
        self._sent: list[tuple[int, int, float]] = []
        self._first_s: dict[tuple[int, int], float] = {}
        self._events.after(spec.period_s, lambda: self._send(1))

    @property
    def rows(self) -> list[StormRow]:
        return [self._row(*sent) for sent in self._sent]

    def _send(self, wave: int) -> None:
        if self._is_over():
            return
        for session in range(self._spec.sessions):
            self._sent.append((wave, session, self._events.now_s()))
            self._post((wave, session))
        self._events.after(self._spec.period_s, lambda: self._send(wave + 1))

    def _post(self, message: tuple[int, int]) -> None:
        def came() -> None:
            self._first_s.setdefault(message, self._events.now_s())

        self._server.post(self._spec.clip_s, MAX_OUTPUT_TOKENS, came)

    def _row(self, wave: int, session: int, start_s: float) -> StormRow:
        first_s = self._first_s.get((wave, session))
        record = TurnRecord(
            kind="posted",
            status="incomplete" if first_s is not None else "failed",
            ttft_ms=None if first_s is None else MS_PER_S * (first_s - start_s),
        )
        return StormRow(wave=wave, session=session, start_s=start_s, record=record)
