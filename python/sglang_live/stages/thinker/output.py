"""A thinker's reply on its way out: what is spoken goes to the talker, calls of functions wait."""

from collections.abc import Callable

from sglang_live.messages import FunctionCallProgress, Progress, TextTokens
from sglang_live.models.qwen3_omni.tool_prompt import ResponseParts
from sglang_live.policy.view import FIRST_INTERRUPTS, FRAME_S
from sglang_live.stages.thinker.turn import Generated
from sglang_live.stages.transport.server import ServedJob

# How many tokens nobody hears are written before a sign of life; silence would look like a fault.
_SIGN_EVERY = 16


class Reply:
    """The reply so far, sent on as it grows. The end-of-turn token is no part of it.

    Args:
        tell_engine: told how far the consumer of the reply is.

    finish: "" until it came to an end. n_audio: tokens of audio that it was asked with.
    """

    def __init__(
        self,
        job: ServedJob,
        end_ids: tuple[int, ...],
        call_begin_id: int | None,
        tell_engine: Callable[[Progress], None],
    ):
        self._job, self._end_ids, self._tell_engine = job, end_ids, tell_engine
        self.ids: list[int] = []
        self.parts = ResponseParts(call_begin_id)
        self.finish, self.n_audio = "", 0
        self._n_sent, self._sent, self._n_unsigned = 0, "", 0
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
            await self._unheard(n_new)

    def consumed(self, progress: Progress) -> None:
        """How far the talker is; whoever acts on a call takes it as it is written."""
        self._consumed = progress
        n_unheard = len(self.ids) - self.parts.n_spoken
        if n_unheard:
            consumed_s = progress.consumed_s + n_unheard * FRAME_S
            progress = Progress(
                progress.job_id, consumed_s, progress.advancing, progress.interrupts
            )
        self._tell_engine(progress)

    async def _unheard(self, n_new: int) -> None:
        self.consumed(self._consumed)
        self._n_unsigned += n_new
        if self._n_unsigned >= _SIGN_EVERY:
            self._n_unsigned = 0
            await self._job.send(FunctionCallProgress(self._job.job_id))


def _whole_characters(text: str) -> str:
    """The text without a last character whose bytes are not all there.

    A token may hold a part of a character. SGLang shows the part as U+FFFD when a reply ends at
    its token limit or is interrupted.
    """
    return text.rstrip("\ufffd")
