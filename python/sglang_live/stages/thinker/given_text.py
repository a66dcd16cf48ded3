"""Responses of the thinker stage whose text no engine generates: scripts and transcripts."""

from collections.abc import Sequence

import numpy as np

from sglang_live.core import AudioPart, HeardToken, HistoryItem, TextPart
from sglang_live.messages import (
    ScriptRequest,
    TextTokens,
    ThinkerDone,
    ThinkerRequest,
    UserSegment,
    WireSegment,
)
from sglang_live.models.prompt import PiecewisePrompt, TalkerReadPrompt
from sglang_live.speakable.pieces import spoken_text
from sglang_live.stages.thinker.hearing import Hearing
from sglang_live.stages.thinker.items import history_item
from sglang_live.stages.transport.server import ServedJob


async def recite(job: ServedJob, script: ScriptRequest, prompt: PiecewisePrompt) -> None:
    """Respond with the script's text, as far as a talker that reads tokens can speak it."""
    text = script.text
    if isinstance(prompt, TalkerReadPrompt):
        text = spoken_text(text, prompt.script_style)
        item = HistoryItem(key=script.key, role="user", parts=(TextPart(text),))
        await job.send(
            UserSegment(job.job_id, WireSegment(script.key, prompt.segment_ids(item, [])))
        )
    await _send(job, prompt.words(text), text)


async def transcribe(job: ServedJob, request: ThinkerRequest, hearing: Hearing) -> None:
    """Respond with the words of the newest item's audio."""
    newest = history_item(request.items[-1], job.frames)
    clips = [part.pcm for part in newest.parts if isinstance(part, AudioPart)]
    if not (request.in_detail or request.translates):
        return await _send(job, [], " ".join([await hearing.transcript_of(pcm) for pcm in clips]))
    pcm = np.concatenate(clips)
    heard = await hearing.detailed_transcript_of(pcm, translates=request.translates)
    text = b"".join(token.piece for token in heard).decode(errors="ignore")
    await _send(job, [], " ".join(text.split()), heard)


async def _send(
    job: ServedJob, ids: list[int], text: str, heard: Sequence[HeardToken] = ()
) -> None:
    await job.send(TextTokens(job.job_id, ids, text))
    await job.send(
        ThinkerDone(
            job.job_id,
            finish="stop",
            ids=ids,
            text=text,
            n_prompt=0,
            n_audio=0,
            n_cached=0,
            rebuilt=False,
            heard=list(heard),
        )
    )
