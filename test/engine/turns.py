"""Greedy turns through real stages, one stage at a time."""

import asyncio
import itertools
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from sglang_live.core import (
    AudioPart,
    HistoryItem,
    ImagePart,
    TextPart,
    TurnRequest,
    VideoPart,
)
from sglang_live.messages import ThinkerDone
from sglang_live.orchestrator.stage_jobs import seed_of
from sglang_live.orchestrator.stage_links import StageLinks

_count = itertools.count()


def user(*parts: str | np.ndarray | ImagePart | VideoPart) -> HistoryItem:
    kinds = {str: TextPart, np.ndarray: AudioPart}
    content = tuple(kinds.get(type(part), lambda seen: seen)(part) for part in parts)
    return HistoryItem(key=f"user-{next(_count)}", role="user", parts=content)


def reply_of(turn: TurnRequest, done: ThinkerDone) -> HistoryItem:
    """The response as an item of the next turn's history."""
    return HistoryItem(
        key=turn.item_key,
        role="assistant",
        parts=(TextPart(done.text),),
        token_ids=tuple(done.ids),
    )


def greedy_turn(*history: HistoryItem, system: str, n_tokens: int) -> TurnRequest:
    return TurnRequest(
        turn_id=f"turn-{next(_count):06d}",
        instructions=system,
        history=tuple(history),
        voice="ethan",
        max_output_tokens=n_tokens,
        temperature=0.0,
    )


async def think(
    links: StageLinks, turn: TurnRequest, interrupt_after: int | None = None
) -> ThinkerDone:
    """interrupt_after: tokens after which the turn is interrupted; None: it runs to its end."""
    async with links.thinker.open(turn) as thought:
        n_tokens = 0
        async for tokens in thought.tokens():
            n_tokens += len(tokens.ids)
            if interrupt_after is not None and n_tokens >= interrupt_after:
                thought.interrupt()
                interrupt_after = None
    return thought.done


async def speak(
    links: StageLinks,
    turn: TurnRequest,
    reply_ids: list[int],
    n_frames: int,
    *,
    start_after_s: float = 0.0,
    token_every_s: float = 0.0,
) -> np.ndarray:
    """Codes [n_frames, 16] of a response whose text arrives at the given pace, then a cancel."""
    await asyncio.sleep(start_after_s)
    # Frames of an earlier, cancelled job may still be on their way under its id.
    again = f"{turn.turn_id}-{next(_count)}"
    turn = replace(turn, turn_id=again, seed=seed_of(turn))
    async with links.talker.open(turn) as speech:
        writing = asyncio.create_task(_write(speech, reply_ids, token_every_s))
        frames: list[np.ndarray] = []
        try:
            async with aclosing(speech.frames()) as chunks:
                async for codes in chunks:
                    frames.extend(np.frombuffer(codes, "<i2").reshape(-1, 16))
                    if len(frames) >= n_frames:
                        break
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
    return np.stack(frames[:n_frames])


async def _write(speech, reply_ids: list[int], token_every_s: float) -> None:
    if not token_every_s:
        await speech.write(reply_ids, "a")
    else:
        for token_id in reply_ids:
            await speech.write([token_id], "a")
            await asyncio.sleep(token_every_s)
    await speech.end_text()
