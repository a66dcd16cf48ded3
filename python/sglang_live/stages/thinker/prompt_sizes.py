"""Counts the tokens of a prompt, outside of the thinker's event loop.

In: MeasurePrompt. Out: PromptMeasured.
"""

import asyncio
from copy import deepcopy
from typing import Any

from sglang_live.messages import MeasurePrompt, PromptMeasured
from sglang_live.models.prompt import PiecewisePrompt
from sglang_live.stages.thinker.fitting_history import (
    AUDIO_TOKENS_PER_S,
    room_for_header,
    room_for_prompt,
)


class PromptSizes:
    """Counts lower bounds, without the markup around messages. One per thinker.

    Args:
        tokenizer: of the prompt, a fast one of transformers.
    """

    def __init__(self, prompt: PiecewisePrompt, tokenizer: Any):
        self._prompt = prompt
        # A copy: whether control tokens are text is a setting of the tokenizer, and the event loop
        # changes it while another thread counts.
        self._tokenizer = deepcopy(tokenizer.backend_tokenizer)
        self._tokenizer.encode_special_tokens = True
        self._one_at_a_time = asyncio.Lock()  # a megabyte takes a core for a second

    async def of(self, request: MeasurePrompt, max_tokens: int) -> PromptMeasured:
        """max_tokens: limit of a request to the engine."""
        header = self._prompt.with_functions(request.instructions, request.functions)
        async with self._one_at_a_time:
            n_header, *n_texts = await asyncio.to_thread(self._count, [header, *request.texts])
        n_audio = sum(AUDIO_TOKENS_PER_S * int(clip_s) for clip_s in request.clips_s)
        room = room_for_prompt(max_tokens)
        return PromptMeasured(
            request.job_id,
            header_tokens=n_header,
            item_tokens=sum(n_texts) + n_audio,
            most_header_tokens=room_for_header(room),
            most_tokens=room,
        )

    def _count(self, texts: list[str]) -> list[int]:
        # encode_batch releases the interpreter's lock, encode does not. One text at a time, because
        # a batch of several would use several cores.
        encode = self._tokenizer.encode_batch
        return [len(encode([text], add_special_tokens=False)[0]) for text in texts]
