"""What a thinker sends of a response: its text as it grows, function calls at the end."""

from collections.abc import Callable

import msgspec

from sglang_live.core import AudioPart, ImagePart, Medium, VideoPart
from sglang_live.messages import FunctionCallProgress, Heard, TextTokens
from sglang_live.models.own_voice import SpokenIds
from sglang_live.models.tool_prompt import ResponseParts
from sglang_live.policy.view import FRAME_S
from sglang_live.stages.thinker.session import Generated
from sglang_live.stages.transport.server import ServedJob

# Unspoken tokens per FunctionCallProgress, but for the first, which says that a call has begun: the
# orchestrator takes a silent thinker for stuck.
_PROGRESS_EVERY = 16


class ResponseOutput:
    """The response so far, without the end-of-turn token.

    Args:
        parts: of the response, still empty.
        report_heard: called with how much of the response was heard.
        speech: of the response, still empty. None: it has no codes.

    Attributes:
        finish: "" until the response ends.
        n_audio, n_image, n_video: tokens of new audio, pictures and videos in the prompt.
    """

    def __init__(
        self,
        job: ServedJob,
        end_ids: tuple[int, ...],
        parts: ResponseParts,
        report_heard: Callable[[Heard], None],
        speech: SpokenIds | None = None,
    ):
        self._job = job
        self._end_ids = end_ids
        self._report_heard = report_heard
        self._speech = speech
        self._step_s = FRAME_S if speech is None else speech.frame_s
        self.ids: list[int] = []
        self.parts = parts
        self.finish = ""
        self.n_audio = self.n_image = self.n_video = 0
        self._n_sent = 0
        self._sent = ""
        self._n_unreported = 0
        self._told_of_call = False
        self._heard = Heard(job.job_id, 0.0, False)

    def continues(self, ids: list[int], text: str) -> None:
        """Another thinker has sent the response's beginning."""
        self.ids = ids
        self.parts.take(ids, text)
        self._n_sent, self._sent = len(ids), text

    def read(self, medium: Medium, n_tokens: int) -> None:
        """The prompt has it."""
        match medium:
            case AudioPart():
                self.n_audio += n_tokens
            case ImagePart():
                self.n_image += n_tokens
            case VideoPart():
                self.n_video += n_tokens

    async def take(self, event: Generated) -> None:
        if self._speech is not None:
            # One by one, however many come at once: text is told with the code that says it.
            for n in range(len(self.ids) + 1, len(event.ids)):
                await self._take(Generated(event.ids[:n], "", None))
        await self._take(event)

    async def _take(self, event: Generated) -> None:
        ids, parts, text, speech = event.ids, self.parts, event.text, self._speech
        if ids and ids[-1] in self._end_ids:
            ids = ids[:-1]
        n_new, n_unspoken = len(ids) - len(self.ids), self._n_unspoken
        self.ids, self.finish = ids, event.finish or self.finish
        codes, spoken = b"", list[tuple[int, float]]()
        if speech is not None:
            # No code says a call.
            text = speech.text(ids, ended=event.finish is not None or parts.begins_call(ids))
            codes, spoken = speech.take_frames()
        text = _whole_characters(text)
        parts.take(ids, text)
        if event.finish is not None:
            parts.end(ids, text)
        new_ids, new_text = ids[self._n_sent : parts.n_spoken], parts.spoken[len(self._sent) :]
        if new_ids or new_text or codes:
            self._n_sent, self._sent = max(self._n_sent, parts.n_spoken), self._sent + new_text
            await self._job.send(TextTokens(self._job.job_id, new_ids, new_text, codes, spoken))
            if speech is not None and self._n_unspoken > n_unspoken:
                self.heard(self._heard)
        elif n_new:
            await self._note_unspoken(n_new)

    def heard(self, news: Heard) -> None:
        """Report what was heard. Function calls count as heard once generated; so does text that
        codes say."""
        self._heard = news
        if n := self._n_unspoken:
            news = msgspec.structs.replace(news, heard_s=news.heard_s + n * self._step_s)
        self._report_heard(news)

    @property
    def _n_unspoken(self) -> int:
        if self._speech is not None:
            return self._speech.n_text
        return len(self.ids) - self.parts.n_spoken

    async def _note_unspoken(self, n_new: int) -> None:
        self.heard(self._heard)
        self._n_unreported += n_new
        begins = self.parts.has_call and not self._told_of_call
        if begins or self._n_unreported >= _PROGRESS_EVERY:
            self._told_of_call = self.parts.has_call
            self._n_unreported = 0
            await self._job.send(FunctionCallProgress(self._job.job_id))


def _whole_characters(text: str) -> str:
    """The text without an incomplete last character.

    A token may hold a part of a character. SGLang decodes the part to U+FFFD when a response ends
    at its token limit or is interrupted.
    """
    return text.rstrip("\ufffd")
