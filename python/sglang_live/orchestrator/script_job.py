"""The text of one turn of a model without a thinker: it is given."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from sglang_live.core import TurnRequest
from sglang_live.messages import TextTokens, ThinkerDone
from sglang_live.orchestrator.stage_jobs import OnStreamEvent, Segment, ignore_event


class ScriptJob:
    """In the place of a ThinkerJob. Attributes: see there."""

    def __init__(self, turn: TurnRequest):
        assert turn.script is not None, "without a language model every text is given"
        self._script = turn.script
        self.on_stream_event: OnStreamEvent = ignore_event
        self.item_key = turn.item_key
        self.done: ThinkerDone | None = None

    async def tokens(self) -> AsyncGenerator[TextTokens, None]:
        yield TextTokens("", [], self._script)
        self.done = ThinkerDone(
            "",
            finish="stop",
            ids=[],
            text=self._script,
            n_prompt=0,
            n_audio=0,
            n_cached=0,
            rebuilt=False,
        )

    def interrupt(self) -> None:
        """Nothing is generated."""

    def promote(self) -> None:
        """Nothing is prefilled."""

    def report(self, consumed_s: float, advancing: bool, interrupts: float) -> None:
        """No stage has this job."""


class ScriptLink:
    """In the place of a ThinkerLink. segments: none, because its talker reads text."""

    def __init__(self) -> None:
        self.segments: dict[str, Segment] = {}

    @asynccontextmanager
    async def open(self, turn: TurnRequest) -> AsyncIterator[ScriptJob]:
        yield ScriptJob(turn)

    def report_speech(self, speaks: bool) -> None:
        """No stage has this session."""

    def report_next_use(
        self, to_play_s: float, response_gap_s: float | None, observed_gap_s: float | None
    ) -> None:
        """No stage has this session."""

    def close(self) -> None:
        """No stage holds anything."""
