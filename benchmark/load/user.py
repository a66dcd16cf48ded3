"""One user: speaks a clip, listens to the response, waits as people do, speaks again.

A user that interrupts speaks the next clip at once, during the response.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from websockets.exceptions import ConnectionClosed

from lab.load_client.options import LoadOptions
from lab.load_client.realtime_client import Interruption, RealtimeClient
from lab.load_client.turn_tracker import TurnTracker
from lab.load_client.utterance import Utterance
from sglang_live.client.connection import SessionError
from sglang_live.clock import Clock
from sglang_live.extensions.planner.simulation.load.arrivals import PlannedTurn, UserPlan
from sglang_live.extensions.planner.simulation.load.rows import TurnRow
from sglang_live.extensions.planner.simulation.load.storm import MAX_OUTPUT_TOKENS
from sglang_live.extensions.planner.simulation.turn_record import TurnRecord


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A turn whose response the next turn interrupts; its record is complete after that one."""

    start_s: float
    end_s: float
    turn: TurnTracker


class User:
    """Runs one plan. A failed turn ends the session; the next turn opens a new one."""

    def __init__(
        self,
        plan: UserPlan,
        audio: Mapping[str, Utterance],
        options: LoadOptions,
        clock: Clock,
        history: str = "",
    ):
        """
        Args:
            audio: clips and sounds by name.
            history: a message with which each session begins; empty: none.

        Attributes:
            played_out_s: end of the latest response's playback.
        """
        self._plan = plan
        self._audio = audio
        self._options = options
        self._clock = clock
        self._history = history
        self._load_began_s = clock.now_s()
        self._interrupted: Interrupted | None = None
        self.rows: list[TurnRow] = []
        self.side_errors: list[str] = []
        self.played_out_s = 0.0
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
                await self._give_up_turn("refused", str(error))
            except ConnectionClosed as error:
                self._end_interrupted()
                await self._give_up_turn("failed", str(error))
            finally:
                sent, late = client.frames_sent_late
                self.frames_sent += sent
                self.frames_late += late
                self.side_errors += client.side_errors

    async def _give_up_turn(self, status: str, error: str) -> None:
        now_s = self._since_start_s()
        self._add_row(now_s, now_s, TurnRecord(kind="speech", status=status, error=error))
        await self._clock.sleep(self._plan.turns[len(self.rows) - 1].response_gap_s)

    async def _converse(self, client: RealtimeClient) -> None:
        if self._history:
            record = await client.post(self._history, MAX_OUTPUT_TOKENS)
            if not record.ok:
                raise SessionError(record.error or record.status)
        while (planned := self._next_turn()) is not None:
            if planned.response_tokens is not None:
                await client.limit_responses(planned.response_tokens)
            start_s = self._since_start_s()
            turn = await client.take_turn(self._audio[planned.clip], self._interruption(planned))
            end_s = self._since_start_s()
            self._end_interrupted()
            if turn.barged:
                self._interrupted = Interrupted(start_s, end_s, turn)
                continue
            record = turn.record()
            self._add_row(start_s, end_s, record)
            if not record.ok:
                return
            await client.wait_until_played()
            self.played_out_s = self._since_start_s()
            await self._clock.sleep(planned.response_gap_s)

    def _interruption(self, planned: PlannedTurn) -> Interruption | None:
        interruption = planned.interruption
        if interruption is None:
            return None
        sound = None if interruption.sound is None else self._audio[interruption.sound]
        return Interruption(interruption.after_s, sound)

    def _end_interrupted(self) -> None:
        interrupted, self._interrupted = self._interrupted, None
        if interrupted is not None:
            self._add_row(interrupted.start_s, interrupted.end_s, interrupted.turn.record())

    def _next_turn(self) -> PlannedTurn | None:
        number = len(self.rows) + (self._interrupted is not None)
        return self._plan.turns[number] if number < len(self._plan.turns) else None

    def _add_row(self, start_s: float, end_s: float, record: TurnRecord) -> None:
        turn = self._plan.turns[len(self.rows)]
        self.rows.append(
            TurnRow(
                user=self._plan.user,
                turn=len(self.rows),
                clip=turn.clip,
                response_gap_s=turn.response_gap_s,
                start_s=start_s,
                end_s=end_s,
                # Hours of audio of many users are not worth the memory.
                record=replace(record, reply_pcm=b""),
                planned=turn.interruption,
            )
        )

    def _since_start_s(self) -> float:
        return self._clock.now_s() - self._load_began_s
