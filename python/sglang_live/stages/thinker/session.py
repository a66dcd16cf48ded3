"""One caller's conversation inside the thinker's engine: an SGLang streaming session.

The history of a turn is reconciled with what the session already holds: what it lacks is
appended; of the last reply, what was not heard is cut off. A history that changed elsewhere is
rebuilt in a new session (and counted).
"""

import logging
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from sglang_live.core import HistoryItem
from sglang_live.engine_channel.messages import THINK_PREFIX, TURN_PREFILL_PREFIX, RetainSession
from sglang_live.errors import ContextLengthError
from sglang_live.kv.retention import RetentionConfig
from sglang_live.models.qwen3_omni.prompt import (
    NO_OPENING,
    Append,
    ChatPrompt,
    Opening,
    Piece,
    Words,
)
from sglang_live.stages.engine_host import EngineHost
from sglang_live.stages.streaming_session import append_request, close_session, open_session
from sglang_live.stages.thinker.engine_control import ThinkerFeed
from sglang_live.stages.thinker.fitting_history import (
    most_tokens_of,
    newest_that_are_kept,
    newest_that_fit,
    room_for_header,
    room_for_prompt,
)
from sglang_live.stages.thinker.held_history import (
    BeforeUtterance,
    LastReply,
    begins_with,
    first_tokens_of,
)
from sglang_live.stages.thinker.turn import Generated, Prefilled, Started, TurnState

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ThinkerSession:
    """
    feed: None without policies. truncates: whether sessions are cut back to what was heard.
    held: keys of the items whose KV the SGLang session holds, in order. ends: where each ends.
    last_reply: the last of them, if it is a reply that was generated here.
    tail: markup that the next turn must write before its first item.
    n_tokens: what was written into the SGLang session; all positions here count so.
    n_header: of the instructions. n_dropped: tokens behind the sink that it has dropped again.
    bound: what the engine was told that it may hold; None: anything.
    lost: the last turn was cut short, and its KV with it.
    before: while the last message that is held has not come to its end.
    left_out: keys of what did not fit; histories have them until a turn that is answered says so.
    cache_salt: part of the radix tree's key for all requests.
    """

    host: EngineHost
    prompt: ChatPrompt
    feed: ThinkerFeed | None = None
    truncates: bool = False
    engine_session: str | None = None
    instructions: str | None = None
    held: list[str] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    last_reply: LastReply | None = None
    tail: list[Piece] = field(default_factory=list)
    n_tokens: int = 0
    n_header: int = 0
    n_dropped: int = 0
    bound: RetainSession | None = None
    lost: bool = False
    before: BeforeUtterance | None = None
    left_out: frozenset[str] = frozenset()
    cache_salt: str = ""
    _places: list[int] = field(default_factory=list)  # of the running turn's clips

    async def think(
        self,
        *,
        instructions: str,
        history: list[HistoryItem],
        reply_key: str,
        sampling: dict,
        end_ids: tuple[int, ...],
        state: TurnState,
        retention: RetentionConfig | None = None,
        opening: Opening = NO_OPENING,
        speculative: bool = False,
        max_tokens: int | None = None,
        drops_oldest: bool = False,
        cache_salt: str = "",
    ) -> AsyncIterator[Started | Prefilled | Generated]:
        """Bring the session up to `history` and generate a reply; none if it is ended before.

        What is Generated begins with the opening. After a speculative turn the next history may
        lack what is new in this one.

        Closing the iterator early, or an error, loses the session's KV: SGLang has no way to keep
        an aborted request's. The next turn then rebuilds it. `interrupt` keeps it.

        Args:
            max_tokens: the session's prompt may have; None: any number.
            drops_oldest: what does not fit leaves from the history's beginning.
            cache_salt: sessions with the same one share their instructions' KV.
        Raises:
            ContextLengthError: it does not fit. Nothing of the history was appended.
        """
        self.cache_salt = cache_salt
        limit = None
        if max_tokens is not None:
            limit = room_for_prompt(max_tokens, len(opening.token_ids))
            self._check_header(instructions, limit)
        given, history = history, await self._reconcile(instructions, history, state, drops_oldest)
        if limit is not None and not self._fits(history[len(self.held) :], limit):
            fitting = newest_that_fit(self.prompt, history, limit - self.n_header, drops_oldest)
            log.warning("history_cut items=%d of=%d", len(history) - len(fitting), len(history))
            history, state.rebuilt = fitting, True
            await self.close()
            await self._open(instructions)
        elif retention is not None and drops_oldest and not self.held:
            # A replayed conversation: what would be dropped after the turn is not prefilled.
            history = newest_that_are_kept(self.prompt, history, retention)
        keys = [item.key for item in history]
        state.dropped = [item.key for item in given if item.key not in frozenset(keys)]
        self.left_out = frozenset(state.dropped)
        self._tell_bound(retention)
        new = history[len(self.held) :]
        before = self.n_tokens, self.last_reply, self.tail
        yield Started(new)
        end, self._places = self.n_tokens + self.prompt.n_tokens(self.tail, iter(())), []
        pieces = self._pieces(new)
        ask = [*self.prompt.open_response(), Words(opening.token_ids)]
        appends, said = self.prompt.appends([*pieces, *ask]), self.prompt.appends(pieces)
        n_alike = max(0, len(said) - 1)  # these are the same, whether or not a reply is asked for
        reply_ids: list[int] | None = None
        completed = False
        try:
            for append in appends[:n_alike]:
                yield await self._prefill(append, state)
            if not state.ending:
                for append in appends[n_alike:-1]:
                    yield await self._prefill(append, state)
                    if state.ending:
                        return  # what asks is in it and cannot be taken back: it is lost
                async for event in self._generate(appends[-1], sampling, state):
                    if isinstance(event, Generated):
                        reply_ids = [*opening.token_ids, *event.ids]
                        event = Generated(reply_ids, opening.text + event.text, event.finish)
                    yield event
            else:
                # The same appends but for the markup that asks; the next turn needs their KV.
                for append in said[n_alike:]:
                    yield await self._prefill(append, state)
            completed = True
        finally:
            if not completed:
                await self._lose()
        n_known = len(self.held)
        self.lost, self.held = False, keys
        places = iter(self._places)
        for item in new:
            end += self.prompt.n_tokens(self.prompt.item(item), places)
            self.ends.append(end)
        self._remember(before, new, n_known, speculative)
        if reply_ids is None:
            self.last_reply, self.tail = None, []
        else:
            self._hold_reply(reply_key, reply_ids, end_ids)

    def _tell_bound(self, retention: RetentionConfig | None) -> None:
        """What the session may hold, once and when it changes."""
        order = None
        if retention is not None:
            sink_tokens = retention.sink_tokens
            order = RetainSession(
                self.engine_session,
                self.n_header if sink_tokens is None else sink_tokens,
                retention.window_tokens,
                retention.slack_tokens,
            )
        if order == self.bound or self.feed is None:
            return
        self.feed.tell_bound(order or RetainSession(self.engine_session, 0, 0, 0))
        self.bound = order

    async def drop_old(self) -> list[str]:
        """Drop what lies between sink and window. Returns the items of which nothing is left."""
        order = self.bound
        if order is None or self.engine_session is None:
            return []
        kept = order.sink_tokens + order.window_tokens + order.slack_tokens
        if self.n_tokens - self.n_dropped <= kept:
            return []
        answer = None
        try:
            answer = await self.feed.retain(order)
        finally:
            # Also when we are cancelled: what the session holds by then is not known.
            if answer is None or answer.n_tokens + answer.n_dropped != self.n_tokens:
                log.warning("session_lost session=%s retained=%s", self.engine_session, answer)
                await self._lose()
        if self.engine_session is None:
            return []
        self.n_dropped = answer.n_dropped
        left = answer.sink_tokens + answer.n_dropped  # what begins before it and behind the sink
        stays = [end <= answer.sink_tokens or end > left for end in self.ends]
        gone = [key for key, stay in zip(self.held, stays, strict=True) if not stay]
        self.held = [key for key, stay in zip(self.held, stays, strict=True) if stay]
        self.ends = [end for end, stay in zip(self.ends, stays, strict=True) if stay]
        return gone

    def interrupt(self, state: TurnState) -> None:
        """Finish the reply of the running turn where it is. Somebody waits for the end of that."""
        state.ending, state.prefill_only = True, False
        running = state.generating or state.prefilling
        if running is not None and self.feed is not None:
            self.feed.interrupt(running)

    async def close(self) -> None:
        session, self.engine_session = self.engine_session, None
        self.held, self.ends, self.last_reply, self.tail = [], [], None, []
        self.before, self.left_out = None, frozenset()
        if session is not None:
            await close_session(self.host, session)

    async def _lose(self) -> None:
        self.lost = True
        await self.close()

    def _check_header(self, instructions: str, limit: int) -> None:
        header = self.prompt.n_tokens(self.prompt.header(instructions), iter(()))
        if header > (most := room_for_header(limit)):
            raise ContextLengthError(
                f"The instructions and tools are {header} tokens long; at most {most} fit."
            )

    def _fits(self, new: list[HistoryItem], limit: int) -> bool:
        tail = self.prompt.n_tokens(self.tail, iter(()))
        n_new = sum(most_tokens_of(self.prompt, item) for item in new)
        return self.n_tokens - self.n_dropped + tail + n_new <= limit

    # --- what is held, and what should be ---

    async def _reconcile(
        self,
        instructions: str,
        history: list[HistoryItem],
        state: TurnState,
        drops_oldest: bool,
    ) -> list[HistoryItem]:
        """Make `held` a prefix of the history: as it is, without its last reply, or anew.

        Returns:
            The history without what this session has left out. Where nothing is held, all of it:
            what fits is chosen anew.
        """
        left_out = self.left_out if drops_oldest else frozenset()
        known = [item for item in history if item.key not in left_out]
        if self.engine_session is not None and instructions == self.instructions:
            await self._withdraw(known, state)
        if self.engine_session is not None and instructions == self.instructions:
            if begins_with(known, self.held):
                return known if self.held else history
            if await self._cut_last_reply(known, state):
                return known if self.held else history
        state.rebuilt = self.engine_session is not None or self.lost
        await self.close()
        await self._open(instructions)
        return history

    async def _cut_last_reply(self, history: list[HistoryItem], state: TurnState) -> bool:
        """Keep of the last reply what the history still has of it: its first tokens, or nothing."""
        reply, before = self.last_reply, self.held[:-1]
        if self.feed is None or not self.truncates or reply is None:
            return False
        if not begins_with(history, before):
            return False
        cut = first_tokens_of(reply, history[len(before) : len(before) + 1])
        if cut is None:
            held, tail, n_tokens = before, [], reply.ask_at
        elif cut.token_ids == reply.ids:
            # Another name for the same tokens.
            self.held = [*before, cut.key]
            return True
        else:
            held, tail = [*before, cut.key], self.prompt.close_response(model_wrote_end=False)
            n_tokens = reply.begin + len(cut.token_ids)
        state.truncated = await self._truncate(n_tokens)
        state.refused = not state.truncated
        if state.truncated:
            self.ends = [*self.ends[: len(before)], *([n_tokens] if cut is not None else [])]
            self.held, self.last_reply, self.tail = held, None, tail
        return state.truncated

    async def _withdraw(self, history: list[HistoryItem], state: TurnState) -> None:
        """Of what was taken in while it was said, keep what the history begins with."""
        before = self.before
        if before is None:
            return
        if begins_with(history, self.held):
            if before.last is not None:
                self._settle()
            return
        if before.last in self.held:
            said = self.held[: self.held.index(before.last) + 1]
            if begins_with(history, said):
                self._settle()  # only the reply is another
                return
        n_known = self.held.index(before.key) if before.key in self.held else len(self.held)
        n = n_known
        if begins_with(history, self.held[:n]):
            while n < len(history) and history[n].key == self.held[n]:
                n += 1
        n_tokens = before.n_tokens if n == n_known else self.ends[n - 1]
        if self.feed is None or n_known == len(self.held) or not await self._truncate(n_tokens):
            await self._lose()
            return
        self.held, self.ends = self.held[:n], self.ends[:n]
        state.truncated = True
        if n == n_known:
            self.last_reply, self.tail, self.before = before.last_reply, before.tail, None
        else:
            self.last_reply, self.tail, self.before = None, [], replace(before, last=None)

    def _remember(
        self, before: tuple, new: list[HistoryItem], n_known: int, speculative: bool
    ) -> None:
        """What to come back to while a message has begun and not ended."""
        if not new:
            return
        begun = [i for i, item in enumerate(new) if item.opens and not item.closes]
        if speculative:
            earlier = self.before or BeforeUtterance(new[0].key, *before)
            in_pieces = self.before is not None
            self.before = replace(earlier, last=new[-1].key, in_pieces=in_pieces)
        elif new[-1].closes:
            if self.before is not None:
                closing = next(item.key for item in new if item.closes)
                self.before = replace(self.before, last=closing, in_pieces=True)
            self._settle()
        elif begun and begun[-1] == 0:
            self.before = BeforeUtterance(new[0].key, *before)
        elif begun:
            at = begun[-1]
            self.before = BeforeUtterance(new[at].key, self.ends[n_known + at - 1], None, [])

    def _settle(self) -> None:
        """The message that had begun is whole. Its pieces go together."""
        before, self.before = self.before, None
        if before is not None and before.in_pieces:
            first, last = self.held.index(before.key), self.held.index(before.last)
            self.ends[first:last] = [self.ends[last]] * (last - first)

    async def _truncate(self, n_tokens: int) -> bool:
        truncated = False
        try:
            truncated = await self.feed.truncate(self.engine_session, n_tokens)
        finally:
            # Also when we are cancelled: what the session holds by then is not known.
            if not truncated:
                await self._lose()
        if truncated:
            self.n_tokens = n_tokens
        return truncated

    def _hold_reply(self, key: str, ids: list[int], end_ids: tuple[int, ...]) -> None:
        ended = bool(ids) and ids[-1] in end_ids
        begin = self.n_tokens - len(ids)
        [ask] = self.prompt.appends(self.prompt.open_response())
        self.held, self.ends = [*self.held, key], [*self.ends, self.n_tokens]
        self.last_reply = LastReply(
            ids=tuple(ids[:-1] if ended else ids), ask_at=begin - len(ask.token_ids), begin=begin
        )
        self.tail = self.prompt.close_response(model_wrote_end=ended)

    # --- requests ---

    def _pieces(self, items: list[HistoryItem]) -> list[Piece]:
        pieces = [*self.tail]
        for item in items:
            pieces += self.prompt.item(item)
        return pieces

    async def _open(self, instructions: str) -> None:
        """A new SGLang session, its header prefilled by itself.

        Only a session's first request meets the radix tree. With the header alone in it, sessions
        share their instructions, and no session ever matches another caller's audio there, whose
        hidden states it would then never see.
        """
        self.engine_session = f"live-{uuid.uuid4().hex}"
        self.instructions, self.n_tokens, self.n_dropped = instructions, 0, 0
        self.bound = None
        opened = False
        try:
            await open_session(self.host, self.engine_session)
            for append in self.prompt.appends(self.prompt.header(instructions)):
                await self._prefill(append, TurnState())
            self.n_header = self.n_tokens
            opened = True
        finally:
            if not opened:
                await self._lose()

    async def _prefill(self, append: Append, state: TurnState) -> Prefilled:
        rid = _new_rid(state)
        sampling = {"max_new_tokens": 0, "temperature": 0}
        state.prefilling = rid if state.prefill_only else None
        try:
            last = await self.host.run(rid, **self._request(append, sampling))
        finally:
            state.prefilling = None
        return self._prefilled(rid, append, last["meta_info"], state)

    def _request(self, append: Append, sampling: dict) -> dict:
        request = append_request(self.engine_session, append, sampling)
        return request | ({"cache_salt": self.cache_salt} if self.cache_salt else {})

    async def _generate(
        self, append: Append, sampling: dict, state: TurnState
    ) -> AsyncIterator[Prefilled | Generated]:
        rid = state.rid = state.generating = _new_rid(state)
        state.on_generating(rid)
        begun = False
        try:
            request = self._request(append, sampling)
            async for chunk in self.host.stream(rid, **request):
                meta = chunk["meta_info"]
                if not begun:
                    yield self._prefilled(rid, append, meta, state)
                    begun = True
                    if self.bound is not None:
                        # Not before: a cut changes what the engine counts as the prompt.
                        self.feed.tell_bound(self.bound, running=rid)
                reason = meta["finish_reason"]
                ids = list(chunk["output_ids"])
                if reason is not None:
                    state.generating = None
                    self.n_tokens += len(ids)
                yield Generated(ids, chunk["text"], reason["type"] if reason else None)
        finally:
            state.generating = None

    def _prefilled(self, rid: str, append: Append, meta: dict, state: TurnState) -> Prefilled:
        # The engine counts what the session holds.
        n_tokens = meta["prompt_tokens"] + self.n_dropped
        n_new, self.n_tokens = n_tokens - self.n_tokens, n_tokens
        if append.clip is not None:
            self._places.append(self.prompt.n_places(append, n_new))
        state.n_prompt = meta["prompt_tokens"]
        state.n_cached = max(state.n_cached, meta["cached_tokens"])
        return Prefilled(rid, append, n_new, meta["prompt_tokens"] - n_new)


def _new_rid(state: TurnState) -> str:
    """By its beginning the engine knows who waits for the request."""
    prefix = TURN_PREFILL_PREFIX if state.prefill_only else THINK_PREFIX if state.timely else ""
    return prefix + uuid.uuid4().hex
