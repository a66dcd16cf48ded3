"""One user's conversation inside the thinker's engine: an SGLang streaming session.

In: the history of each turn. Out: what the turn prefills and generates.
ledger.py decides whether the engine session is kept, truncated or built anew; this file sends the
requests.
"""

import io
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import soundfile as sf

from sglang_live import ids
from sglang_live.core import (
    INPUT_RATE_HZ,
    AudioPart,
    HistoryItem,
    ImagePart,
    TextPart,
    VideoPart,
)
from sglang_live.ids import FLEX_PREFIX, TEXT_PREFIX, THINK_PREFIX, TURN_PREFILL_PREFIX
from sglang_live.kv.retention import RetentionConfig
from sglang_live.messages import RetainSession
from sglang_live.models.prompt import (
    NO_OPENING,
    Append,
    Opening,
    Piece,
    PiecewisePrompt,
    Words,
)
from sglang_live.stages.engine_host import EngineHost
from sglang_live.stages.thinker.engine_control import ThinkerFeed
from sglang_live.stages.thinker.ledger import Keep, Ledger, Rebuild, TruncateTo, reconcile
from sglang_live.stages.thinker.prompt_sizes import (
    check_header,
    keys_missing,
    most_tokens_of,
    newest_that_are_kept,
    newest_that_fit,
    room_for_prompt,
)

# SGLang requires a bound on a session's text; here sessions are bounded in tokens.
_UNBOUNDED_CHARS = 1 << 40


async def open_session(host: EngineHost, name: str) -> None:
    from sglang.srt.managers.io_struct import OpenSessionReqInput

    request = OpenSessionReqInput(
        capacity_of_str_len=_UNBOUNDED_CHARS, session_id=name, streaming=True
    )
    await host.engine.tokenizer_manager.open_session(request, None)


async def close_session(host: EngineHost, name: str) -> None:
    from sglang.srt.managers.io_struct import CloseSessionReqInput

    request = CloseSessionReqInput(session_id=name)
    await host.engine.tokenizer_manager.close_session(request, None)


def append_request(name: str, append: Append, sampling: dict) -> dict:
    """Arguments of the request that appends to the session and generates behind it."""
    request: dict = {"sampling_params": sampling, "session_params": {"id": name}}
    if not append.clips:
        return request | {"input_ids": list(append.token_ids)}
    sounds = [wav_bytes(clip) for clip in append.clips if isinstance(clip, AudioPart)]
    pictures = [clip.png for clip in append.clips if isinstance(clip, ImagePart)]
    # With colours first: the processor would take 3 rows for them.
    videos = [v.frames.transpose(0, 3, 1, 2) for v in append.clips if isinstance(v, VideoPart)]
    media = {"audio_data": sounds, "image_data": pictures, "video_data": videos}
    return request | {"prompt": append.text} | {name: data for name, data in media.items() if data}


def wav_bytes(clip: AudioPart) -> bytes:
    out = io.BytesIO()
    sf.write(out, clip.pcm, INPUT_RATE_HZ, format="WAV", subtype="PCM_16")
    return out.getvalue()


@dataclass(frozen=True, slots=True)
class Started:
    """The turn begins. items: those that the engine session lacks, and now prefills."""

    items: list[HistoryItem]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """One request of the turn was prefilled.

    n_new: tokens that it added to the engine session.
    begin: position of the first of them, in what the engine holds now.
    """

    rid: str
    append: Append
    n_new: int
    begin: int


@dataclass(frozen=True, slots=True)
class Generated:
    """The response so far. finish: why it ended. None: it goes on."""

    ids: list[int]
    text: str
    finish: str | None


@dataclass(slots=True)
class TurnState:
    """State of one turn. The session writes it; the stage writes `ending` only.

    job_id: of the turn's job.
    n_prompt: tokens of the prompt.
    n_cached: those of them whose KV was not computed anew.
    rebuilt: whether the engine session was built anew.
    truncated: whether the engine session was truncated.
    refused: whether the engine refused to truncate it.
    generating: id of the request that generates the response. None: there is none now.
    rid: the same, kept after the request. "": there was none yet.
    on_generating: called with that id before the request is sent.
    ending: whether the response is to end where it is.
    prefill_only: whether the user still speaks, so that nothing waits for the turn.
    timely: whether the response is heard, so that every delay counts.
    flex: whether it is best-effort work.
    prefilling: id of the request that prefills, in a turn prefill. None: there is none now.
    dropped: keys of the oldest items, which did not fit.
    options: tokens between which the response chooses. logprobs: of them, once it has chosen.
    """

    job_id: str = "warm-up"
    n_prompt: int = 0
    n_cached: int = 0
    rebuilt: bool = False
    truncated: bool = False
    refused: bool = False
    generating: str | None = None
    rid: str = ""
    on_generating: Callable[[str], None] = lambda rid: None
    ending: bool = False
    prefill_only: bool = False
    timely: bool = True
    flex: bool = False
    prefilling: str | None = None
    dropped: list[str] = field(default_factory=list)
    options: list[int] = field(default_factory=list)
    logprobs: dict[int, float] = field(default_factory=dict)

    @property
    def rid_prefix(self) -> str:
        """Prefix of the turn's request ids, from which the engine derives their urgency."""
        if self.prefill_only:
            return TURN_PREFILL_PREFIX
        if self.flex:
            return FLEX_PREFIX
        return THINK_PREFIX if self.timely else TEXT_PREFIX


log = logging.getLogger(__name__)


@dataclass(slots=True)
class ThinkerSession:
    """
    feed: control channel of the engine. None without policies.
    truncates: whether a response is truncated to what was heard of it.
    engine_session: name of the SGLang session. None: there is none.
    instructions: those that the engine session begins with.
    ledger: what the engine session holds.
    bound: what the engine may keep of the engine session. None: everything.
    lost: whether the last turn failed or was aborted, which costs the engine session's KV.
    cache_salt: part of the radix tree's key for all requests.
    told: placeholders of each clip of the items that were sent to the talker, by key. Their KV
        may come from the radix tree, which yields no states.
    """

    host: EngineHost
    prompt: PiecewisePrompt
    session_id: str
    feed: ThinkerFeed | None = None
    truncates: bool = False
    engine_session: str | None = None
    instructions: str | None = None
    ledger: Ledger = field(default_factory=Ledger)
    bound: RetainSession | None = None
    lost: bool = False
    cache_salt: str = ""
    told: dict[str, list[int]] = field(default_factory=dict)
    _places: list[int] = field(default_factory=list)  # of the running turn's clips
    _untold: list[HistoryItem] = field(default_factory=list)  # held, and not sent to the talker

    async def think(
        self,
        *,
        instructions: str,
        history: list[HistoryItem],
        item_key: str,
        sampling: dict[str, Any],
        state: TurnState,
        retention: RetentionConfig | None = None,
        opening: Opening = NO_OPENING,
        speculative: bool = False,
        max_tokens: int | None = None,
        drops_oldest: bool = False,
        cache_salt: str = "",
    ) -> AsyncGenerator[Started | Prefilled | Generated, None]:
        """Bring the engine session up to `history` and generate a response, unless the turn is
        interrupted before.

        What is Generated begins with the opening. After a speculative turn the next history may
        lack what is new in this one.

        Closing the iterator early, or an error, closes the engine session, and the next turn opens
        another one; `interrupt` keeps it.

        Args:
            max_tokens: limit of the engine session's prompt. None: no limit.
            drops_oldest: a history that does not fit loses its oldest items.
            cache_salt: sessions with the same one share their instructions' KV.
        Raises:
            ContextLengthError: the history does not fit. Nothing of it was appended.
        """
        self.cache_salt = cache_salt
        limit = None
        if max_tokens is not None:
            limit = room_for_prompt(max_tokens, len(opening.token_ids))
            check_header(self.prompt, instructions, limit)
        self.told = {item.key: self.told[item.key] for item in history if item.key in self.told}
        said = self._said_before(instructions, history, limit, retention)
        known = await self._reconcile(instructions, history, state, drops_oldest, said)
        fitting = await self._fit(known, limit, drops_oldest, retention, state)
        state.dropped = keys_missing(history, fitting)
        self.ledger = replace(self.ledger, left_out=frozenset(state.dropped))
        self._tell_bound(retention)
        start, new = self.ledger, fitting[len(self.ledger.items) :]
        yield Started([*self._untold, *new])
        self._untold = []
        self._places = []
        self.lost = False
        response_ids: list[int] | None = None
        async with aclosing(self._run(new, opening, sampling, state)) as events:
            async for event in events:
                if isinstance(event, Generated):
                    response_ids = event.ids
                yield event
        if self.lost:
            return
        self.ledger = self.ledger.after_turn(
            new, self._ends_of(new, start), begun_at=start.n_tokens, speculative=speculative
        )
        if response_ids is not None:
            self._hold_response(item_key, response_ids)

    def interrupt(self, state: TurnState) -> None:
        """End the running turn's response where it is."""
        state.ending = True
        if state.generating is not None and self.feed is not None:
            self.feed.interrupt(state.generating)

    def promote(self, state: TurnState) -> None:
        """Another turn waits for the end of the running turn prefill."""
        state.prefill_only = False
        if state.prefilling is not None and self.feed is not None:
            self.feed.promote(state.prefilling)

    async def drop_old(self) -> list[str]:
        """Drop what lies between sink and window. Returns the items of which nothing is left."""
        order = self.bound
        if order is None or self.engine_session is None or self.feed is None:
            return []
        kept = order.sink_tokens + order.window_tokens + order.slack_tokens
        if self.ledger.n_resident <= kept:
            return []
        answer = None
        try:
            answer = await self.feed.retain(order)
        finally:
            # Also on cancellation: what the engine session holds by then is not known.
            if answer is None or answer.n_tokens + answer.n_dropped != self.ledger.n_tokens:
                log.warning("session_lost session=%s retained=%s", self.engine_session, answer)
                await self.lose()
        if self.lost or answer is None:
            return []
        self.ledger, gone = self.ledger.after_drop(answer.sink_tokens, answer.n_dropped)
        return gone

    async def close(self) -> None:
        session, self.engine_session = self.engine_session, None
        self.ledger = Ledger()
        if session is not None:
            await close_session(self.host, session)

    async def lose(self) -> None:
        self.lost = True
        await self.close()

    # --- bringing the engine session to a beginning of the history ---

    def _said_before(
        self,
        instructions: str,
        history: list[HistoryItem],
        limit: int | None,
        retention: RetentionConfig | None,
    ) -> list[HistoryItem]:
        """The history's beginning that one request may compute anew: the talker has all of it, or
        a client has brought it in writing, so that it may be there from an earlier session."""
        said = _brought(history)
        n_header = self.prompt.n_tokens(self.prompt.header(instructions), iter(()))
        if retention is not None:  # without a compaction
            limit = min(filter(None, (limit, n_header + retention.window_tokens)))
        else:
            said_by_model = lambda i: i.role == "assistant" and i.token_ids is not None  # noqa: E731
            is_there = lambda i: i.key in self.told or said_by_model(i)  # noqa: E731
            told = [*takewhile(lambda i: i.opens and i.closes and is_there(i), history)]
            said = max(told, said, key=len)
        n_tokens = n_header + sum(most_tokens_of(self.prompt, item) for item in said)
        return said if limit is None or n_tokens <= limit else []

    async def _reconcile(
        self,
        instructions: str,
        history: list[HistoryItem],
        state: TurnState,
        drops_oldest: bool,
        said: list[HistoryItem],
    ) -> list[HistoryItem]:
        """Make the engine session hold a beginning of the history: kept, truncated or rebuilt.

        Args:
            said: see _said_before().
        Returns:
            The history without what this session has left out; all of it where nothing is held.
        """
        left_out = self.ledger.left_out if drops_oldest else frozenset()
        known = [item for item in history if item.key not in left_out]
        is_same = self.engine_session is not None and instructions == self.instructions
        if is_same and await self._hold_beginning(known, state):
            left = [item for item in known if item.key not in state.dropped]
            return left if state.dropped or self.ledger.items else history
        state.rebuilt = self.engine_session is not None or self.lost
        await self.close()
        await self._open(instructions, state, said)
        return history

    async def _hold_beginning(self, history: list[HistoryItem], state: TurnState) -> bool:
        """Returns False if the engine session has to be built anew."""
        can = {
            "can_truncate": self.feed is not None,
            "cuts_responses": self.feed is not None and self.truncates,
        }
        waited = self.ledger.utterance is not None  # until then, nothing was dropped
        while True:
            match reconcile(self.ledger, history, **can):
                case Keep(ledger):
                    self.ledger = ledger
                    if waited and ledger.utterance is None:
                        state.dropped = await self.drop_old()
                    return not self.lost
                case TruncateTo(ledger):
                    state.truncated = await self.truncate(ledger)
                    state.refused = not state.truncated
                    if state.refused:
                        return False
                case Rebuild():
                    return False

    async def truncate(self, ledger: Ledger) -> bool:
        """Returns False if the engine refused: the engine session is lost then."""
        assert self.feed is not None and self.engine_session is not None
        truncated = False
        try:
            truncated = await self.feed.truncate(self.engine_session, ledger.n_tokens)
        finally:
            # Also on cancellation: what the engine session holds by then is not known.
            if not truncated:
                await self.lose()
        if truncated:
            self.ledger = ledger
        return truncated

    async def _fit(
        self,
        history: list[HistoryItem],
        limit: int | None,
        drops_oldest: bool,
        retention: RetentionConfig | None,
        state: TurnState,
    ) -> list[HistoryItem]:
        """The part of the history that fits; without its oldest items, in a new engine session."""
        if limit is not None and not self._fits(history[len(self.ledger.items) :], limit):
            room = limit - self.ledger.n_header
            fitting = newest_that_fit(self.prompt, history, room, drops_oldest)
            log.warning("history_cut items=%d of=%d", len(history) - len(fitting), len(history))
            await self.close()
            await self._open(self.instructions or "", state)
            state.rebuilt = True
            return fitting
        if retention is not None and drops_oldest and not self.ledger.items:
            # A replayed conversation: what would be dropped after the turn is not prefilled.
            kept = retention.behind(self.ledger.n_header)
            return newest_that_are_kept(self.prompt, history, kept)
        return history

    def _fits(self, new: list[HistoryItem], limit: int) -> bool:
        tail = self.prompt.n_tokens(self._tail(self.ledger), iter(()))
        n_new = sum(most_tokens_of(self.prompt, item) for item in new)
        return self.ledger.n_resident + tail + n_new <= limit

    def _tell_bound(self, retention: RetentionConfig | None) -> None:
        """Tell the engine what the engine session may hold, once and when it changes."""
        assert self.engine_session is not None
        order = None
        if retention is not None:
            kept = retention.behind(self.ledger.n_header)
            assert kept.sink_tokens is not None
            order = RetainSession(
                self.engine_session, kept.sink_tokens, kept.window_tokens, kept.slack_tokens
            )
        if order == self.bound or self.feed is None:
            return
        self.feed.tell_bound(order or RetainSession(self.engine_session, 0, 0, 0))
        self.bound = order

    # --- what a turn adds ---

    def _tail(self, ledger: Ledger) -> list[Piece]:
        """Markup that ends the response at the end of the engine session, if there is one."""
        if ledger.response_ended is None:
            return []
        return self.prompt.close_response(model_wrote_end=ledger.response_ended)

    def _ends_of(self, items: Sequence[HistoryItem], start: Ledger) -> list[int]:
        """Position behind each item that the turn has appended to what `start` held."""
        ends: list[int] = []
        end = start.n_tokens + self.prompt.n_tokens(self._tail(start), iter(()))
        places = iter(self._places)
        for item in items:
            end += self.prompt.n_tokens(self.prompt.item(item), places)
            ends.append(end)
        return ends

    def _hold_response(self, key: str, response_ids: list[int]) -> None:
        [ask] = self.prompt.appends(self.prompt.open_response())
        self.ledger = self.ledger.with_response(
            key,
            response_ids,
            model_wrote_end=bool(response_ids) and response_ids[-1] in self.prompt.end_ids,
            opening_tokens=len(ask.token_ids),
        )

    # --- requests ---

    async def _run(
        self, new: list[HistoryItem], opening: Opening, sampling: dict[str, Any], state: TurnState
    ) -> AsyncGenerator[Prefilled | Generated, None]:
        """Prefill the new items and generate; what is not completed loses the engine session."""
        pieces = self._tail(self.ledger)
        for item in new:
            pieces += self.prompt.item(item)
        ask = [*self.prompt.open_response(), Words(opening.token_ids)]
        appends, said = self.prompt.appends([*pieces, *ask]), self.prompt.appends(pieces)
        n_alike = max(0, len(said) - 1)  # the same with and without a response
        completed = False
        try:
            for append in appends[:n_alike]:
                yield await self.prefill(append, state)
            if state.ending:
                # Without the markup that opens a response; the next turn needs their KV.
                for append in said[n_alike:]:
                    yield await self.prefill(append, state)
            else:
                for append in appends[n_alike:-1]:
                    yield await self.prefill(append, state)
                    if state.ending:
                        return  # lost: the markup that opens a response is in it
                async for event in self._generate(appends[-1], sampling, state):
                    if isinstance(event, Generated):
                        token_ids = [*opening.token_ids, *event.ids]
                        text = self.prompt.text_behind(opening, event.ids, event.text)
                        event = Generated(token_ids, text, event.finish)
                    yield event
            completed = True
        finally:
            if not completed:
                await self.lose()

    async def _open(
        self, instructions: str, state: TurnState, said: Sequence[HistoryItem] = ()
    ) -> None:
        """A new SGLang session, its header prefilled by itself, or with the messages in `said`.

        Only a session's first request meets the radix tree. Audio that is new never does: where
        another user's session has the same audio behind the same words, the talker would miss its
        hidden states. With the header in the tree, sessions share their instructions.
        """
        self.engine_session = ids.new_engine_session(self.session_id)
        self.instructions = instructions
        self.ledger = Ledger()
        self.bound = None
        self._untold = []
        opened = False
        try:
            await open_session(self.host, self.engine_session)
            # While the user speaks, nothing waits for the header.
            own = state if state.prefill_only else TurnState(self.engine_session, flex=state.flex)
            header = self.prompt.header(instructions)
            pieces = [piece for item in said for piece in self.prompt.item(item)]
            whole = self.prompt.as_one([*header, *pieces])
            for append in self.prompt.appends(header) if whole is None else [whole]:
                await self.prefill(append, own)
            state.n_prompt, state.n_cached = own.n_prompt, own.n_cached
            n_header = self.prompt.n_tokens(header, iter(()))
            self.ledger = replace(self.ledger, n_header=n_header)
            if whole is not None:
                self._places = [n for item in said for n in self.told.get(item.key, ())]
                ends = self._ends_of(said, replace(self.ledger, n_tokens=n_header))
                assert [n_header, *ends][-1] == self.ledger.n_tokens, "placeholders have changed"
                self.ledger = self.ledger.after_turn(
                    said, ends, begun_at=n_header, speculative=False
                )
                self._untold = [item for item in said if item.key not in self.told]
            opened = True
        finally:
            if not opened:
                await self.lose()

    async def prefill(self, append: Append, state: TurnState) -> Prefilled:
        rid = ids.new_rid(state.rid_prefix, state.job_id)
        sampling = {"max_new_tokens": 0, "temperature": 0}
        state.prefilling = rid if state.prefill_only else None
        try:
            last = await self.host.run(rid, **self._request(append, sampling))
        finally:
            state.prefilling = None
        return self._prefilled(rid, append, last["meta_info"], state)

    def _request(self, append: Append, sampling: dict[str, Any]) -> dict[str, Any]:
        assert self.engine_session is not None
        request = append_request(self.engine_session, append, sampling)
        return request | ({"cache_salt": self.cache_salt} if self.cache_salt else {})

    async def _generate(
        self, append: Append, sampling: dict[str, Any], state: TurnState
    ) -> AsyncGenerator[Prefilled | Generated, None]:
        rid = state.rid = state.generating = ids.new_rid(state.rid_prefix, state.job_id)
        state.on_generating(rid)
        begun = False
        try:
            request = self._request(append, sampling)
            if state.options:
                request |= {"return_logprob": True, "token_ids_logprob": state.options}
            async for chunk in self.host.stream(rid, **request):
                meta = chunk["meta_info"]
                if not begun:
                    yield self._prefilled(rid, append, meta, state)
                    begun = True
                    if self.bound is not None and self.feed is not None:
                        # Not before: compaction changes what the engine counts as the prompt.
                        self.feed.tell_bound(self.bound, running=rid)
                if state.options and not state.logprobs:
                    [first] = meta["output_token_ids_logprobs"]
                    state.logprobs = {token: logprob for logprob, token, _ in first}
                reason = meta["finish_reason"]
                token_ids = list(chunk["output_ids"])
                if reason is not None:
                    state.generating = None
                    self.ledger = self.ledger.after_append(len(token_ids))
                yield Generated(token_ids, chunk["text"], reason["type"] if reason else None)
        finally:
            state.generating = None

    def _prefilled(
        self, rid: str, append: Append, meta: dict[str, Any], state: TurnState
    ) -> Prefilled:
        # The engine counts what the engine session holds now.
        n_new = meta["prompt_tokens"] - self.ledger.n_resident
        self.ledger = self.ledger.after_append(n_new)
        if append.clips:
            self._places.append(self.prompt.n_places(append, n_new))
        if not state.n_prompt:  # what later requests find is what the turn's first ones computed
            state.n_cached = meta["cached_tokens"]
        state.n_prompt = meta["prompt_tokens"]
        return Prefilled(rid, append, n_new, meta["prompt_tokens"] - n_new)


def _brought(history: list[HistoryItem]) -> list[HistoryItem]:
    """Its beginning that a client has written, up to the last message of the assistant."""

    def is_written(item: HistoryItem) -> bool:
        is_whole = item.opens and item.closes and item.token_ids is None
        return is_whole and all(isinstance(part, TextPart) for part in item.parts)

    items = [*takewhile(is_written, history)]
    while items and items[-1].role != "assistant":
        items.pop()
    return items
