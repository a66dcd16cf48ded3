"""Sends a thinker's response as it grows: text at once, function calls at the end."""

from collections.abc import Callable

from sglang_live.messages import FunctionCallProgress, Progress, TextTokens
from sglang_live.models.tool_prompt import ResponseParts
from sglang_live.policy.view import FIRST_INTERRUPTS, FRAME_S
from sglang_live.stages.thinker.turn import Generated
from sglang_live.stages.transport.server import ServedJob

# Unspoken tokens per FunctionCallProgress, but for the first, which says that a call has begun: the
# orchestrator takes a silent thinker for stuck.
_PROGRESS_EVERY = 16


class ResponseOutput:
    """The response so far, without the end-of-turn token.

    Args:
        report_progress: called with the progress of the response's consumer.
        has_functions: whether the response may call functions.

    Attributes:
        finish: "" until the response ends.
        n_audio: tokens of new audio in the prompt.
    """

    def __init__(
        self,
        job: ServedJob,
        end_ids: tuple[int, ...],
        call_begin_id: int | None,
        report_progress: Callable[[Progress], None],
        has_functions: bool = True,
    ):
        self._job, self._end_ids, self._report_progress = job, end_ids, report_progress
        self.ids: list[int] = []
        self.parts = ResponseParts(call_begin_id, has_functions)
        self.finish, self.n_audio = "", 0
        self._n_sent, self._sent, self._n_unreported = 0, "", 0
        self._told_of_call = False
        self._consumed = Progress(job.job_id, 0.0, False, FIRST_INTERRUPTS)

    async def take(self, event: Generated) -> None:
        ids, parts, text = event.ids, self.parts, _whole_characters(event.text)
        if ids and ids[-1] in self._end_ids:
            ids = ids[:-1]
        n_new = len(ids) - len(self.ids)
        self.ids, self.finish = ids, event.finish or self.finish
        parts.take(ids, text)
        if event.finish is not None:
            parts.end(ids, text)
        new_ids, new_text = ids[self._n_sent : parts.n_spoken], parts.spoken[len(self._sent) :]
        if new_ids or new_text:
            self._n_sent, self._sent = max(self._n_sent, parts.n_spoken), self._sent + new_text
            await self._job.send(TextTokens(self._job.job_id, new_ids, new_text))
        elif n_new:
            await self._note_unspoken(n_new)

    def consumed(self, progress: Progress) -> None:
        """Report the consumer's progress. Function calls count as consumed once generated."""
        self._consumed = progress
        n_unspoken = len(self.ids) - self.parts.n_spoken
        if n_unspoken:
            consumed_s = progress.consumed_s + n_unspoken * FRAME_S
            progress = Progress(
                progress.job_id, consumed_s, progress.advancing, progress.interrupts
            )
        self._report_progress(progress)

    async def _note_unspoken(self, n_new: int) -> None:
        self.consumed(self._consumed)
        self._n_unreported += n_new
        begins = self.parts.has_call and not self._told_of_call
        if begins or self._n_unreported >= _PROGRESS_EVERY:
            self._told_of_call, self._n_unreported = self.parts.has_call, 0
            await self._job.send(FunctionCallProgress(self._job.job_id))


def _whole_characters(text: str) -> str:
    """The text without an incomplete last character.

    A token may hold a part of a character. SGLang decodes the part to U+FFFD when a response ends
    at its token limit or is interrupted.
    """
    return text.rstrip("\ufffd")
