"""Clients of plain SGLang: each turn is one request with the whole conversation.

`python -m lab.launch_server --stateless …` has the server's thinker ask its engine as a chat client
of SGLang does. There is no session; the radix tree has what earlier requests have left there,
aborted ones too. It is the baseline of the benchmarks, for models that hear.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from sglang_live import ids
from sglang_live.core import AudioPart, HistoryItem
from sglang_live.models.prompt import NO_OPENING, Append, Opening, Words
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.thinker import stage
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


@dataclass(slots=True)
class StatelessSession(ThinkerSession):
    """
    _n_told: placeholders of the clips that the talker has, and that a running turn has found.
    """

    _n_told: int = 0

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
        """As ThinkerSession.think, without anything that is kept."""
        self.told = {item.key: self.told[item.key] for item in history if item.key in self.told}
        self._n_told = sum(sum(n_places) for n_places in self.told.values())
        new = [item for item in history if item.key not in self.told]
        yield Started(new)
        pieces = self.prompt.header(instructions)
        for item in history:
            pieces += self.prompt.item(item)
        pieces += [*self.prompt.open_response(), Words(opening.token_ids)]
        appends = self.prompt.appends(pieces)
        n_new = sum(isinstance(part, AudioPart) for item in new for part in item.parts)
        with_clip = [n for n, append in enumerate(appends) if append.clips]
        # The talker has the states of a request's last clip; there is one new clip as a rule.
        for n in with_clip[len(with_clip) - n_new : -1]:
            rid = ids.new_rid(state.rid_prefix, state.job_id)
            last = await self.host.run(rid, **self._whole(appends[: n + 1], _PREFILL))
            yield self._found(rid, appends[: n + 1], last["meta_info"], state)
        rid = state.rid = state.generating = ids.new_rid(state.rid_prefix, state.job_id)
        state.on_generating(rid)
        begun = False
        try:
            async with aclosing(self.host.stream(rid, **self._whole(appends, sampling))) as chunks:
                async for chunk in chunks:
                    if not begun:
                        yield self._found(
                            rid, appends, chunk["meta_info"], state, has_new=n_new > 0
                        )
                        begun = True
                    reason = chunk["meta_info"]["finish_reason"]
                    token_ids = [*opening.token_ids, *chunk["output_ids"]]
                    text = self.prompt.text_behind(opening, chunk["output_ids"], chunk["text"])
                    yield Generated(token_ids, text, reason["type"] if reason else None)
        finally:
            state.generating = None

    def _whole(self, appends: Sequence[Append], sampling: dict[str, Any]) -> dict[str, Any]:
        clips = [wav_bytes(clip) for append in appends for clip in append.clips]
        # Another user's equal clip behind equal words would leave the talker without its states.
        own = {"sampling_params": sampling, "cache_salt": self.session_id}
        if not clips:
            return own | {"input_ids": [id for append in appends for id in append.token_ids]}
        return own | {"prompt": self._text(appends), "audio_data": clips}

    def _text(self, appends: Sequence[Append]) -> str:
        return "".join(a.text or self.prompt._tokenizer.decode(list(a.token_ids)) for a in appends)

    def _found(
        self,
        rid: str,
        appends: Sequence[Append],
        meta: dict[str, Any],
        state: TurnState,
        *,
        has_new: bool = True,
    ) -> Prefilled:
        """What the request has of its last clip, if that is new."""
        n_prompt = meta["prompt_tokens"]
        if not state.n_prompt:
            state.n_cached = meta["cached_tokens"]
        state.n_prompt = n_prompt
        if not has_new:
            return Prefilled(rid, Append(), 0, n_prompt)
        at = max(n for n, append in enumerate(appends) if append.clips)
        n_clips = sum(len(append.clips) for append in appends)
        n_marks = len(self.prompt.markup_ids(self._text(appends))) - n_clips
        n_places = n_prompt - n_marks - self._n_told
        self._n_told += n_places
        clip, behind = appends[at], self._text(appends[at + 1 :])
        n_new = n_places + len(self.prompt.markup_ids(clip.text)) - 1
        begin = n_prompt - len(self.prompt.markup_ids(behind)) - n_new
        return Prefilled(rid, clip, n_new, begin)
