"""One caller: speaks a clip, listens to the reply, waits as people do, speaks again."""

from dataclasses import dataclass
from typing import Any

from benchmark.load.arrivals import CallerPlan, PlannedTurn
from sglang_live.client.realtime_client import RealtimeClient, SessionError
from sglang_live.client.session_options import SessionOptions
from sglang_live.client.turn_record import TurnRecord
from sglang_live.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRow:
    """A turn and where it belongs. Times are seconds since the load began."""

    caller: int
    turn: int
    clip: str
    reply_gap_s: float
    start_s: float
    end_s: float
    record: TurnRecord

    def to_json(self) -> dict[str, Any]:
        place = {name: getattr(self, name) for name in self.__slots__ if name != "record"}
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in place.items()}
        return {**rounded, **self.record.to_json()}


class Caller:
    """Runs one plan. A failed turn ends the session; the next turn opens a new one."""

    def __init__(
        self, plan: CallerPlan, speech: dict[str, bytes], options: SessionOptions, clock: Clock
    ):
        self._plan = plan
        self._speech = speech
        self._options = options
        self._clock = clock
        self._load_began_s = clock.now_s()
        self.rows: list[TurnRow] = []
        self.frames_sent = 0
        self.frames_late = 0

    async def run(self) -> None:
        await self._clock.sleep(self._plan.start_s)
        while len(self.rows) < len(self._plan.turns):
            client = RealtimeClient(self._options, self._clock)
            try:
                async with client:
                    await self._converse(client)
            except SessionError as error:
                now_s = self._since_start_s()
                self._add_row(now_s, TurnRecord(kind="speech", status="refused", error=str(error)))
                await self._clock.sleep(self._plan.turns[len(self.rows) - 1].reply_gap_s)
            finally:
                sent, late = client.frames_sent_late
                self.frames_sent += sent
                self.frames_late += late

    async def _converse(self, client: RealtimeClient) -> None:
        while len(self.rows) < len(self._plan.turns):
            turn = self._next_turn()
            start_s = self._since_start_s()
            record = await client.speak(self._speech[turn.clip])
            self._add_row(start_s, record)
            if not record.ok:
                return
            await client.wait_until_played()
            await self._clock.sleep(turn.reply_gap_s)

    def _add_row(self, start_s: float, record: TurnRecord) -> None:
        turn = self._next_turn()
        self.rows.append(
            TurnRow(
                caller=self._plan.caller,
                turn=len(self.rows),
                clip=turn.clip,
                reply_gap_s=turn.reply_gap_s,
                start_s=start_s,
                end_s=self._since_start_s(),
                record=record,
            )
        )

    def _next_turn(self) -> PlannedTurn:
        return self._plan.turns[len(self.rows)]

    def _since_start_s(self) -> float:
        return self._clock.now_s() - self._load_began_s
