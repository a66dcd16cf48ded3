"""Clients of plain SGLang: each turn is one request with the whole conversation.

`python -m lab.launch_server --stateless …` has the server's thinker ask its engine as a chat client
of SGLang does. There is no session; the radix tree has what earlier requests have left there,
aborted ones too. It is the baseline of the benchmarks, for models that hear.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_live import ids
from sglang_live.core import AudioPart, HistoryItem
from sglang_live.messages import Picture
from sglang_live.models.prompt import NO_OPENING, Append, Opening, Words
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.thinker import stage
from sglang_live.stages.thinker.audio_states import AudioStates
from sglang_live.stages.thinker.session import (
    Generated,
    Prefilled,
    Started,
    ThinkerSession,
    TurnState,
    wav_bytes,
)

_PREFILL = {"max_new_tokens": 0, "temperature": 0}


def attach(place: str) -> None:
    if place == "stage" and StageSpec.from_env().stage == "thinker":
        stage.ThinkerSession = StatelessSession  # type: ignore[misc]
        stage.AudioStates = KeptStates  # type: ignore[misc]


class KeptStates(AudioStates):
    """Keeps states for a second request: the radix tree has the KV of a clip whose turn was
    cancelled, and the engine does not compute it again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[tuple[str, int], tuple[np.ndarray, list[Picture]]] = {}

    async def of(self, rid: str, n_rows: int, begin: int) -> tuple[np.ndarray, list[Picture]]:
        if (rid, begin) not in self._kept:
            self._kept[rid, begin] = await super().of(rid, n_rows, begin)
        return self._kept[rid, begin]


@dataclass(slots=True)
class StatelessSession(ThinkerSession):
    """
    _clips: what was found of each item with a clip, by key.
    _salt: part of the radix tree's key.
    """

    _clips: dict[str, Prefilled] = field(default_factory=dict)
    _salt: str = ""

    async def think(
        self,
        *,
        instructions: str,
        history: list[HistoryItem],
        item_key: str,
        sampling: dict[str, Any],
        state: TurnState,
        opening: Opening = NO_OPENING,
        **_: Any,
    ) -> AsyncGenerator[Started | Prefilled | Generated, None]:
        """As ThinkerSession.think, without anything that is kept in the engine."""
        self.told = {item.key: self.told[item.key] for item in history if item.key in self.told}
        new = [item for item in history if item.key not in self.told]
        yield Started(new)
        pieces = self.prompt.header(instructions)
        for item in history:
            pieces += self.prompt.item(item)
        pieces += [*self.prompt.open_response(), Words(opening.token_ids)]
        appends = self.prompt.appends(pieces)
        heard = [item.key for item in history if _has_clip(item)]
        ends = [n + 1 for n, append in enumerate(appends) if append.clips]
        asked = [key for key in heard if key not in self._clips]
        # All but the last one were never asked for: their turn was cancelled before.
        for key in asked[:-1]:
            rid = ids.new_rid(state.rid_prefix, state.job_id)
            said = appends[: ends[heard.index(key)]]
            last = await self.host.run(rid, **self._whole(said, _PREFILL))
            self._clips[key] = self._found(rid, said, heard, last["meta_info"])
        rid = state.rid = state.generating = ids.new_rid(state.rid_prefix, state.job_id)
        state.on_generating(rid)
        begun = False
        try:
            async with aclosing(self.host.stream(rid, **self._whole(appends, sampling))) as chunks:
                async for chunk in chunks:
                    meta = chunk["meta_info"]
                    if not begun:
                        begun = True
                        state.n_prompt = meta["prompt_tokens"]
                        state.n_cached = meta["cached_tokens"]
                        if asked:
                            self._clips[asked[-1]] = self._found(rid, appends, heard, meta)
                        for item in new:
                            if _has_clip(item):
                                yield self._clips[item.key]
                    reason = meta["finish_reason"]
                    token_ids = [*opening.token_ids, *chunk["output_ids"]]
                    text = self.prompt.text_behind(opening, chunk["output_ids"], chunk["text"])
                    yield Generated(token_ids, text, reason["type"] if reason else None)
        finally:
            state.generating = None
            if asked and not begun:
                # Cancelled while it was prefilled: the tree has KV whose states may be lost.
                self._salt = rid

    def _whole(self, appends: Sequence[Append], sampling: dict[str, Any]) -> dict[str, Any]:
        media = [clip for append in appends for clip in append.clips]
        clips = [wav_bytes(clip) for clip in media if isinstance(clip, AudioPart)]
        assert len(clips) == len(media), "this arm is measured without pictures"
        # Another user's equal clip behind equal words would leave the talker without its states.
        own = {"sampling_params": sampling, "cache_salt": f"{self.session_id}{self._salt}"}
        if not clips:
            return own | {"input_ids": [id for append in appends for id in append.token_ids]}
        return own | {"prompt": self._text(appends), "audio_data": clips}

    def _text(self, appends: Sequence[Append]) -> str:
        return "".join(a.text or self.prompt._tokenizer.decode(list(a.token_ids)) for a in appends)

    def _found(
        self, rid: str, appends: Sequence[Append], heard: Sequence[str], meta: dict[str, Any]
    ) -> Prefilled:
        """What the request has of its last clip. heard: items with a clip, in order."""
        n_prompt = meta["prompt_tokens"]
        with_clip = [n for n, append in enumerate(appends) if append.clips]
        at = with_clip[-1]
        earlier = [self._clips[key] for key in heard[: len(with_clip) - 1]]
        n_earlier = sum(self.prompt.n_places(one.append, one.n_new) for one in earlier)
        n_marks = len(self.prompt.markup_ids(self._text(appends))) - len(with_clip)
        clip, behind = appends[at], self._text(appends[at + 1 :])
        n_new = n_prompt - n_marks - n_earlier + len(self.prompt.markup_ids(clip.text)) - 1
        begin = n_prompt - len(self.prompt.markup_ids(behind)) - n_new
        return Prefilled(rid, clip, n_new, begin)


def _has_clip(item: HistoryItem) -> bool:
    return any(isinstance(part, AudioPart) for part in item.parts)
