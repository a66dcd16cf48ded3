"""Prefill of an utterance while the user still speaks.

At the end of the user's turn only the last piece is left to encode and prefill (LiveServe, arXiv
2606.22983, section 3). A preheat, of the conversation alone, is one of these.
Owner: one TurnPrefill per session.
"""

import asyncio
import logging
from dataclasses import replace

from sglang_live.aio import background
from sglang_live.core import HistoryItem, ImagePart, TurnDone, TurnRequest
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
        # Keys of pieces, and of messages with pictures, since the last response.
        self._prefilled: set[str] = set()

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
        """The turn's usage, with the audio and pictures that were prefilled before the turn."""
        keys = [item.key for item in turn.history if item.key in self._prefilled]
        segments = [self._thinker.segments[key] for key in keys if key in self._thinker.segments]
        n_states = sum(len(each.states) for each in segments if each.states is not None)
        n_image = sum(seen.n_tokens for each in segments for seen in each.pictures)
        usage = replace(
            done.usage,
            input_text_tokens=done.usage.input_text_tokens - n_states,
            input_audio_tokens=done.usage.input_audio_tokens + n_states - n_image,
            input_image_tokens=done.usage.input_image_tokens + n_image,
        )
        return replace(done, usage=usage)

    def answered(self) -> None:
        """The turn is part of the conversation: the next one's usage is without its media."""
        self._prefilled = set()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self, turn: TurnRequest, content: bytes) -> None:
        # Those of earlier turns were told before.
        told = self._thinker.segments.keys()
        new = {item.key for item in turn.history if item.key not in told and _is_counted(item)}
        try:
            with self._suspects.turn(turn.turn_id, content):
                async with self._thinker.open(turn) as thinker:
                    self._job = thinker
                    async for _ in thinker.tokens():
                        pass
            if not turn.preheat:
                self._prefilled |= new
        except LiveError as error:
            # The turn itself prefills it, or fails for a reason that its client sees.
            log.warning("not_prefilled turn=%s: %s", turn.turn_id, error)
        finally:
            self._job = None


def _is_counted(item: HistoryItem) -> bool:
    """Whether it has media that a turn may find prefilled."""
    return not item.closes or any(isinstance(part, ImagePart) for part in item.parts)
