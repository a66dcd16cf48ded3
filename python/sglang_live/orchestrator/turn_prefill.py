"""Prefill of an utterance while the user still speaks.

At the end of the user's turn only the last piece is left to encode and prefill (LiveServe, arXiv
2606.22983, section 3). A preheat, of the conversation alone, is one of these.
Owner: one TurnPrefill per session.
"""

import asyncio
import logging
from dataclasses import replace

from sglang_live.aio import background
from sglang_live.core import TurnDone, TurnRequest
from sglang_live.errors import LiveError
from sglang_live.orchestrator.stage_jobs import ScriptJob, ThinkerJob
from sglang_live.orchestrator.stage_links import ScriptLink, ThinkerLink
from sglang_live.orchestrator.suspects import Suspects

log = logging.getLogger(__name__)


class TurnPrefill:
    """Runs one turn prefill at a time, and none while a turn runs."""

    def __init__(self, thinker: ThinkerLink | ScriptLink, suspects: Suspects):
        self._thinker = thinker
        self._suspects = suspects
        self._task: asyncio.Task[None] | None = None
        self._job: ThinkerJob | ScriptJob | None = None  # None: none has begun yet
        self._prefilled: set[str] = set()  # keys of pieces, since the last response

    @property
    def runs(self) -> bool:
        return self._task is not None and not self._task.done()

    def prefill_turn(self, turn: TurnRequest, content: bytes) -> bool:
        """Returns False if one runs already.

        Args:
            content: hash of the turn's content (TurnContent).
        """
        if self.runs:
            return False
        self._task = background(self._run(turn, content), "turn prefill")
        return True

    async def finish(self) -> None:
        """Wait for the running turn prefill, which goes before other requests now."""
        if self._task is not None and self.runs:
            if self._job is not None:
                self._job.promote()
            await asyncio.wait({self._task})

    def with_usage(self, done: TurnDone, turn: TurnRequest) -> TurnDone:
        """The turn's usage, with the audio that was prefilled before the turn."""
        segments, prefilled = self._thinker.segments, self._prefilled
        states = [
            segments[item.key].states
            for item in turn.history
            if item.key in prefilled and item.key in segments
        ]
        n_audio = sum(len(rows) for rows in states if rows is not None)
        usage = replace(
            done.usage,
            input_text_tokens=done.usage.input_text_tokens - n_audio,
            input_audio_tokens=done.usage.input_audio_tokens + n_audio,
        )
        return replace(done, usage=usage)

    def answered(self) -> None:
        """The turn is part of the conversation: the next one's usage is without its audio."""
        self._prefilled = set()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self, turn: TurnRequest, content: bytes) -> None:
        try:
            with self._suspects.turn(turn.turn_id, content):
                async with self._thinker.open(turn) as thinker:
                    self._job = thinker
                    async for _ in thinker.tokens():
                        pass
            if not turn.preheat:
                self._prefilled |= {item.key for item in turn.history if not item.closes}
        except LiveError as error:
            # The turn itself prefills it, or fails for a reason that its client sees.
            log.warning("not_prefilled turn=%s: %s", turn.turn_id, error)
        finally:
            self._job = None
