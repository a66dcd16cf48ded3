"""How long prompts are, and what of a history fits into one."""

import asyncio
from copy import deepcopy
from math import ceil
from typing import Any

from sglang_live.core import AudioPart, HistoryItem, Medium
from sglang_live.errors import ContextLengthError
from sglang_live.kv.retention import RetentionConfig
from sglang_live.messages import MeasurePrompt, PromptMeasured
from sglang_live.models.prompt import PiecewisePrompt

# 12.5 tokens a second, rounded up once per started second.
AUDIO_TOKENS_PER_S = 13
# An eighth of the context is for the response. Instructions may fill three quarters of the rest.
_RESPONSE_SHARE, _HEADER_SHARE = 8, 0.75
_MARKUP_TOKENS = 8  # the markup that opens a response, and a margin
# After dropping items a quarter is free, because each dropping prefills the conversation anew.
_KEEP_SHARE = 0.75


def room_for_prompt(max_tokens: int, opening_tokens: int = 0) -> int:
    """The most tokens of instructions and messages together.

    Args:
        max_tokens: limit of a request.
        opening_tokens: of the response's opening (see Opening).
    """
    return max_tokens - max_tokens // _RESPONSE_SHARE - opening_tokens - _MARKUP_TOKENS


def room_for_header(room_tokens: int) -> int:
    """The most of them for instructions and functions."""
    return int(room_tokens * _HEADER_SHARE)


def check_header(prompt: PiecewisePrompt, instructions: str, room_tokens: int) -> None:
    """Raises ContextLengthError if the instructions and functions do not fit."""
    header = prompt.n_tokens(prompt.header(instructions), iter(()))
    if header > (most := room_for_header(room_tokens)):
        raise ContextLengthError(
            f"The instructions and tools are {header} tokens long; at most {most} fit."
        )


def most_tokens_of(prompt: PiecewisePrompt, item: HistoryItem) -> int:
    """An upper bound of the tokens that the item adds to a session."""
    return prompt.n_tokens(prompt.item(item), map(_most_places, prompt.media(item)))


def _most_places(medium: Medium) -> int:
    if isinstance(medium, AudioPart):
        return AUDIO_TOKENS_PER_S * (ceil(medium.duration_s) + 1)
    return medium.most_tokens


def newest_that_fit(
    prompt: PiecewisePrompt, history: list[HistoryItem], limit_tokens: int, drops_oldest: bool
) -> list[HistoryItem]:
    """The history without its oldest messages, so that it fits and leaves room for more.

    Raises:
        ContextLengthError: the newest message alone does not fit, or nothing may be dropped.
    """
    sizes = [most_tokens_of(prompt, item) for item in history]
    total = sum(sizes)
    if total > limit_tokens and not drops_oldest:
        raise ContextLengthError(
            f"The conversation is {total} tokens long; at most {limit_tokens} fit. "
            "Delete items, or make them shorter."
        )
    begins = [i for i, item in enumerate(history) if item.opens] or [0]
    newest = sum(sizes[begins[-1] :])
    if newest > limit_tokens:
        raise ContextLengthError(
            f"The newest message is {newest} tokens long; at most {limit_tokens} fit. "
            "Delete it, or make it shorter."
        )
    kept = begins[-1]
    for begin in reversed(begins):
        if sum(sizes[begin:]) > limit_tokens * _KEEP_SHARE:
            break
        kept = begin
    return history[kept:]


def newest_that_are_kept(
    prompt: PiecewisePrompt, history: list[HistoryItem], retention: RetentionConfig
) -> list[HistoryItem]:
    """The history without its oldest items that exceed the window.

    All items behind the last assistant item stay, however long: the model has not seen them yet.
    """
    last = max((i for i, item in enumerate(history) if item.role == "assistant"), default=-1)
    sizes = [most_tokens_of(prompt, item) for item in history]
    total = sum(sizes)
    if total <= retention.window_tokens + retention.slack_tokens:
        return history
    kept = 0
    while kept <= last and (total > retention.window_tokens or not history[kept].opens):
        total -= sizes[kept]
        kept += 1
    return history[kept:]


def keys_missing(history: list[HistoryItem], fitting: list[HistoryItem]) -> list[str]:
    """Keys of the history's items that are not in its fitting part."""
    left = frozenset(item.key for item in fitting)
    return [item.key for item in history if item.key not in left]


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
            item_tokens=sum(n_texts) + n_audio + request.picture_tokens,
            most_header_tokens=room_for_header(room),
            most_tokens=room,
        )

    def _count(self, texts: list[str]) -> list[int]:
        # encode_batch releases the interpreter's lock, encode does not. One text at a time, because
        # a batch of several would use several cores.
        encode = self._tokenizer.encode_batch
        return [len(encode([text], add_special_tokens=False)[0]) for text in texts]
