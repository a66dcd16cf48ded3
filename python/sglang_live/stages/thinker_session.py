"""One caller's conversation inside the thinker's engine: an SGLang streaming session.

The history of a turn is reconciled with what the session already holds: what it lacks is
appended; a history that changed underneath is rebuilt in a new session (and counted).
"""

import io
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import soundfile as sf

from sglang_live.models.qwen3_omni.prompt import Append, ChatPrompt, Piece
from sglang_live.orchestrator.history import INPUT_RATE_HZ, AudioPart, HistoryItem
from sglang_live.stages.engine_host import EngineHost

# SGLang asks for a bound on a session's text; ours is bounded by tokens, elsewhere.
_UNBOUNDED_CHARS = 1 << 40


@dataclass(frozen=True, slots=True)
class Started:
    """The turn begins; `items` are those the session lacked and now takes in."""

    items: list[HistoryItem]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """One request of a turn was prefilled. n_new: tokens it added to the session."""

    rid: str
    append: Append
    n_new: int


@dataclass(frozen=True, slots=True)
class Generated:
    """Reply so far, cumulative. finish: None while it goes on."""

    ids: list[int]
    text: str
    finish: str | None


@dataclass(slots=True)
class TurnCounts:
    n_prompt: int = 0
    n_cached: int = 0
    rebuilt: bool = False


@dataclass(slots=True)
class ThinkerSession:
    """
    held: keys of the items whose KV the SGLang session holds, in order.
    tail: markup that the next turn must write before its first item.
    lost: the last turn was cut short, and its KV with it.
    """

    host: EngineHost
    prompt: ChatPrompt
    engine_session: str | None = None
    instructions: str | None = None
    held: list[str] = field(default_factory=list)
    tail: list[Piece] = field(default_factory=list)
    n_tokens: int = 0
    lost: bool = False

    async def think(
        self,
        *,
        instructions: str,
        history: list[HistoryItem],
        reply_key: str,
        sampling: dict,
        end_ids: tuple[int, ...],
        counts: TurnCounts,
    ) -> AsyncIterator[Started | Prefilled | Generated]:
        """Bring the session up to `history` and generate a reply.

        Closing the iterator early, or an error, loses the session's KV: SGLang has no way to keep
        an aborted request's. The next turn then rebuilds it.
        """
        keys = [item.key for item in history]
        n_held = len(self.held)
        if (
            self.engine_session is None
            or instructions != self.instructions
            or keys[:n_held] != self.held
        ):
            counts.rebuilt = self.engine_session is not None or self.lost
            await self.close()
            await self._open(instructions)
            n_held = 0
        yield Started(history[n_held:])
        appends = self._appends(history[n_held:])
        engine_session, self.engine_session = self.engine_session, None  # ours again when done
        completed = False
        try:
            for append in appends[:-1]:
                yield await self._prefill(engine_session, append, counts)
            async for event in self._generate(engine_session, appends[-1], sampling, counts):
                yield event
            completed = True
        finally:
            self.held, self.tail, self.lost = [], [], not completed
            if completed:
                self.engine_session = engine_session
            else:
                await _close(self.host, engine_session)
        self.held = [*keys, reply_key]
        ended = bool(event.ids) and event.ids[-1] in end_ids
        self.tail = self.prompt.close_reply(model_wrote_end=ended)

    async def close(self) -> None:
        if self.engine_session is not None:
            await _close(self.host, self.engine_session)
        self.engine_session, self.held, self.tail = None, [], []

    def _appends(self, items: list[HistoryItem]) -> list[Append]:
        pieces = [*self.tail]
        for item in items:
            pieces += self.prompt.item(item)
        return self.prompt.appends([*pieces, *self.prompt.ask()])

    async def _open(self, instructions: str) -> None:
        """A new SGLang session, its header prefilled by itself.

        Only a session's first request meets the radix tree. With the header alone in it, sessions
        share their instructions, and no session ever matches another caller's audio there, whose
        hidden states it would then never see.
        """
        engine_session = f"live-{uuid.uuid4().hex}"
        await self.host.engine.tokenizer_manager.open_session(_open_request(engine_session), None)
        self.instructions, self.n_tokens = instructions, 0
        for append in self.prompt.appends(self.prompt.header(instructions)):
            await self._prefill(engine_session, append, TurnCounts())
        self.engine_session = engine_session

    async def _prefill(self, session: str, append: Append, counts: TurnCounts) -> Prefilled:
        rid = uuid.uuid4().hex
        sampling = {"max_new_tokens": 0, "temperature": 0}
        last = await self.host.run(rid, **_request(session, append, sampling))
        return self._prefilled(rid, append, last["meta_info"], counts)

    async def _generate(
        self, session: str, append: Append, sampling: dict, counts: TurnCounts
    ) -> AsyncIterator[Prefilled | Generated]:
        rid = uuid.uuid4().hex
        begun = False
        async for chunk in self.host.stream(rid, **_request(session, append, sampling)):
            meta = chunk["meta_info"]
            if not begun:
                yield self._prefilled(rid, append, meta, counts)
                begun = True
            reason = meta["finish_reason"]
            ids = list(chunk["output_ids"])
            if reason is not None:
                self.n_tokens += len(ids)
            yield Generated(ids, chunk["text"], reason["type"] if reason else None)

    def _prefilled(self, rid: str, append: Append, meta: dict, counts: TurnCounts) -> Prefilled:
        n_new = meta["prompt_tokens"] - self.n_tokens
        self.n_tokens = meta["prompt_tokens"]
        counts.n_prompt = meta["prompt_tokens"]
        counts.n_cached = max(counts.n_cached, meta["cached_tokens"])
        return Prefilled(rid, append, n_new)


def _request(session: str, append: Append, sampling: dict) -> dict:
    request: dict = {"sampling_params": sampling, "session_params": {"id": session}}
    if append.clip is None:
        return request | {"input_ids": list(append.token_ids)}
    return request | {"prompt": append.text, "audio_data": [wav_bytes(append.clip)]}


def wav_bytes(clip: AudioPart) -> bytes:
    out = io.BytesIO()
    sf.write(out, clip.pcm, INPUT_RATE_HZ, format="WAV", subtype="PCM_16")
    return out.getvalue()


def _open_request(engine_session: str):
    from sglang.srt.managers.io_struct import OpenSessionReqInput

    return OpenSessionReqInput(
        capacity_of_str_len=_UNBOUNDED_CHARS, session_id=engine_session, streaming=True
    )


async def _close(host: EngineHost, engine_session: str) -> None:
    from sglang.srt.managers.io_struct import CloseSessionReqInput

    request = CloseSessionReqInput(session_id=engine_session)
    await host.engine.tokenizer_manager.close_session(request, None)
