"""What a caller has said so far, taken in by the thinker while the rest is being said.

At the end of the turn only its last piece is left to encode and prefill (LiveServe, arXiv
2606.22983, section 3).
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from sglang_live.core import TurnDone, TurnRequest
from sglang_live.errors import LiveError
from sglang_live.orchestrator.stage_links import ThinkerLink
from sglang_live.orchestrator.suspects import Suspects

log = logging.getLogger(__name__)


class TurnPrefill:
    """One at a time, and none while a turn runs."""

    def __init__(self, thinker: ThinkerLink, suspects: Suspects):
        self._thinker, self._suspects = thinker, suspects
        self._task: asyncio.Task[None] | None = None
        self._hurry: Callable[[], None] = lambda: None
        self._prefilled: set[str] = set()  # keys of pieces, since the last turn

    def prefill_turn(self, turn: TurnRequest, content: bytes) -> bool:
        """content: its hash, see TurnContent."""
        if self._task is not None and not self._task.done():
            return False
        self._task = asyncio.create_task(self._run(turn, content), name=f"take in {turn.turn_id}")
        return True

    async def ended(self) -> None:
        """Somebody waits now for what still runs."""
        if self._task is not None and not self._task.done():
            self._hurry()
            await asyncio.wait({self._task})

    def counted(self, done: TurnDone, turn: TurnRequest) -> TurnDone:
        """The turn's usage with the audio that was taken in ahead of it."""
        segments, prefilled = self._thinker.segments, self._prefilled
        self._prefilled = set()
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

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self, turn: TurnRequest, content: bytes) -> None:
        try:
            with self._suspects.turn(turn.turn_id, content):
                async with self._thinker.open(turn) as thought:
                    self._hurry = thought.interrupt
                    async for _ in thought.tokens():
                        pass
            self._prefilled |= {item.key for item in turn.history if not item.closes}
        except LiveError as error:
            # The turn itself will take it in, or fail for a reason that its caller hears of.
            log.warning("not_taken_in turn=%s: %s", turn.turn_id, error)
        finally:
            self._hurry = lambda: None
