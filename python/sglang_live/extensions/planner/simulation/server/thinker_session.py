"""One conversation in a simulated thinker: its requests, and its KV in tokens.

As stages/thinker/session.py, by the same ledger: an engine session is kept, truncated or built
anew; each request is sent when the result of the one before it has come, and the last one generates
the response. Of stateless clients (ServerSpec) the radix tree keeps what a session would.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

from sglang_live.core import HistoryItem
from sglang_live.extensions.planner.simulation.engine.pool import KvPool
from sglang_live.extensions.planner.simulation.engine.requests import Request
from sglang_live.extensions.planner.simulation.engine.session import SessionKv
from sglang_live.extensions.planner.simulation.engine.tiers import Tiers
from sglang_live.extensions.planner.simulation.server.link import Sizes
from sglang_live.extensions.planner.simulation.server.turn_spec import TurnSpec
from sglang_live.ids import HEARD_PREFIXES, TEXT_PREFIX, THINK_PREFIX, TURN_PREFILL_PREFIX
from sglang_live.kv.retention import compaction_of, media_after
from sglang_live.messages import RetainSession, ThinkerRequest, UserSegment, WireSegment
from sglang_live.policy.policies import Policies
from sglang_live.stages.thinker.ledger import (
    LEAST_PREHEAT_TOKENS,
    Keep,
    Ledger,
    Rebuild,
    TruncateTo,
    reconcile,
)

if TYPE_CHECKING:  # it holds these sessions
    from sglang_live.extensions.planner.simulation.server.thinker import SimulatedThinker

# Markup of Qwen3-Omni around a user's clip and before the response, and behind a response.
TURN_MARKUP_TOKENS, END_MARKUP_TOKENS = 9, 2
AUDIO_TOKENS_PER_S = 12.5


def size_of_user(audio_s: float, n_text: int = 0) -> Sizes:
    n_audio = round(audio_s * AUDIO_TOKENS_PER_S)
    return Sizes(n_audio + n_text + TURN_MARKUP_TOKENS, audio_s)


@dataclass(slots=True, kw_only=True)
class ThinkerKv:
    """What all sessions of an engine share.

    header: tokens of the instructions, which all sessions share in the radix tree.
    tiers: None: KV stays on the device until its session is closed.
    stateless: see ServerSpec.
    n_rebuilt: sessions whose conversation was computed again.
    """

    pool: KvPool
    policies: Policies
    header: int
    tiers: Tiers | None
    stateless: bool
    n_rebuilt: int = 0


@dataclass(eq=False, slots=True)
class Thought:
    """State of one turn; see TurnState of stages/thinker/session.py. on_token: called with each."""

    request: ThinkerRequest
    on_token: Callable[[int], None]
    ids: list[int] = field(default_factory=list)
    rid: str = ""
    generating: str | None = None
    prefilling: str | None = None
    ending: bool = False
    prefill_only: bool = False
    n_prompt: int = 0
    n_cached: int = 0
    rebuilt: bool = False
    n_requests: int = 0

    def __post_init__(self) -> None:
        self.prefill_only = self.request.prefill_only
        self.ids = list(self.request.continues)

    def new_rid(self) -> str:
        prefix = THINK_PREFIX if self.request.timely else TEXT_PREFIX
        if self.prefill_only:
            prefix = TURN_PREFILL_PREFIX
        self.n_requests += 1
        return f"{prefix}{self.request.job_id}-{self.n_requests}"


class ThinkerSession:
    """
    ledger: what the engine session holds. held: the same as KV.
    told: keys of user messages that the talker has.
    """

    def __init__(self, session_id: str, thinker: "SimulatedThinker"):
        self.ledger = Ledger()
        self.held = SessionKv(session_id)
        self.told: set[str] = set()
        self._thinker = thinker
        self._kv = thinker.kv
        self._is_open = self._was_lost = False
        self._media: list[tuple[int, int]] = []  # clips in the KV behind the header
        self._thought: Thought | None = None
        self._ended: asyncio.Future[None] | None = None
        self._header: Request | None = None

    @property
    def n_held(self) -> int:
        """Tokens that the next request need not compute."""
        tiers = self._kv.tiers
        on_host = 0 if tiers is None else tiers.on_host(self.held)
        return self._kv.header + self.ledger.n_dropped + self.held.n_device + on_host

    def resume(self, items: Sequence[HistoryItem], sizes: Mapping[str, Sizes]) -> None:
        """It has been going on for a while: it holds the KV of these items."""
        n_tokens = sum(sizes[item.key].n_tokens for item in items)
        self._kv.pool.take(n_tokens)
        self._open_ledger()
        self._hold(items, sizes)
        self.held.n_tokens = self.held.n_device = n_tokens
        self.told |= {item.key for item in items}
        self._went_idle()

    def _went_idle(self) -> None:
        if self._kv.tiers is not None and self._is_open:
            self._kv.tiers.end(self.held)

    def segments(
        self, job_id: str, history: Sequence[HistoryItem], sizes: Mapping[str, Sizes]
    ) -> list[UserSegment]:
        """The user messages that the talker lacks."""
        users = [i for i in history if i.role == "user" and i.key not in self.told]
        return [UserSegment(job_id, WireSegment(i.key, [0] * sizes[i.key].n_tokens)) for i in users]

    async def think(
        self,
        history: Sequence[HistoryItem],
        sizes: Mapping[str, Sizes],
        thought: Thought,
        spec: TurnSpec | None,
    ) -> None:
        """Bring the engine session up to the history and generate the response; spec: None: no
        response. Cancelled, it loses the engine session."""
        self._thought = thought
        try:
            if self._kv.tiers is not None:
                self._kv.tiers.begin(self.held)
            if not (self._is_open and await self._hold_beginning(history)):
                await self._begin_anew(history, sizes)
            new = list(history[len(self.ledger.items) :])
            *pieces, last = self._pieces(new, sizes) or [Sizes(0)]
            for piece in pieces:
                await self._prefill(piece)
            if spec is None or thought.ending:
                if last.n_tokens:
                    await self._prefill(last)
                self._hold(new, sizes, speculative=thought.request.speculative)
            else:
                self._hold(new, sizes, speculative=thought.request.speculative)
                # What another replica has generated of the response is part of the prompt.
                n_said = len(thought.request.continues)
                await self._generate(replace(last, n_tokens=last.n_tokens + n_said), spec)
        except BaseException:
            if not self._kv.stateless:
                self.lose()
            raise
        else:
            self.told = {item.key for item in history}
        finally:
            self._thought = None
            self._went_idle()

    async def needs_preheat(self, history: Sequence[HistoryItem], thought: Thought) -> bool:
        """As Preheats.begin of stages/thinker/preheat.py."""
        if not self._is_open:
            return True
        step = self._reconcile(history)
        if isinstance(step, Rebuild):
            return True
        feed = self._thinker.feed
        if feed is None:
            return False
        self._thought = thought
        if self._kv.tiers is not None:
            self._kv.tiers.begin(self.held)
        try:
            n_held = await feed.kv_held(self.held.session_id)
            if n_held is not None and self.ledger.n_tokens - n_held >= LEAST_PREHEAT_TOKENS:
                await self._prefill(Sizes(0))
        finally:
            self._thought = None
            self._went_idle()
        return False

    async def drop_old(self, request: ThinkerRequest) -> list[str]:
        """Drop what lies between sink and window. Returns the items of which nothing is left."""
        feed, header = self._thinker.feed, self._kv.header
        if request.window_tokens is None or feed is None or not self._is_open:
            return []
        order = RetainSession(
            self.held.session_id, header, request.window_tokens, request.slack_tokens
        )
        if self.ledger.n_resident <= header + order.window_tokens + order.slack_tokens:
            return []
        answer = await feed.retain(order)
        if answer is None or answer.n_tokens + answer.n_dropped != self.ledger.n_tokens:
            self.lose()
            return []
        self.ledger, gone = self.ledger.after_drop(answer.sink_tokens, answer.n_dropped)
        return gone

    def lose(self) -> None:
        """Forget its KV; its next turn computes the conversation again."""
        self._was_lost = self._was_lost or self._is_open
        self._kv.pool.release(self.held.n_device)
        self.held.n_tokens = self.held.n_device = 0
        if self._kv.tiers is not None:
            self._kv.tiers.forget(self.held)
        self._is_open = False
        self.ledger = Ledger()
        self._media = []

    # --- in the engine ---

    def truncated(self, n_tokens: int) -> None:
        """It keeps its first n_tokens, as the ledger counts."""
        self._shorten(self.held.n_tokens - (n_tokens - self._kv.header - self.ledger.n_dropped))

    def compacted(self, order: RetainSession) -> tuple[int, int]:
        """Returns the tokens that it holds, and those dropped so far."""
        header = self._kv.header
        media = [(first + header, behind + header) for first, behind in self._media]
        found = compaction_of(
            n_tokens=self.held.n_tokens + header,
            sink_tokens=header,
            window_tokens=order.window_tokens,
            page_size=1,
            owned_from=header,
            media=media,
            slack_tokens=order.slack_tokens,
        )
        n_dropped = 0
        if found is not None:
            n_dropped = found.n_tokens
            kept = media_after(found, media)
            self._media = [(first - header, behind - header) for first, behind in kept]
            self._shorten(n_dropped)
        return self.held.n_tokens + header, self.ledger.n_dropped + n_dropped

    def came(self, req: Request) -> None:
        """A token of the response."""
        thought = self._thought
        if thought is not None:
            thought.ids.append(len(thought.ids) + 1)
            thought.on_token(thought.ids[-1])

    def ended(self, req: Request) -> None:
        header, held = self._kv.header, self.held
        if req is self._header:  # the radix tree has it
            self._kv.pool.release(req.kv - req.cached_tokens if req.computed else 0)
            return self._end()
        n_kept = req.prompt_tokens - header + req.n_out
        n_now = req.kv - header if req.computed else held.n_device
        self._kv.pool.release(max(0, n_now - n_kept))
        held.n_tokens = held.n_device = min(n_kept, n_now)
        self._end()

    def _end(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _shorten(self, n_tokens: int) -> None:
        held = self.held
        held.n_tokens -= n_tokens
        over = max(0, held.n_device - held.n_tokens)
        held.n_device -= over
        self._kv.pool.release(over)
        self._media = [span for span in self._media if span[1] <= held.n_tokens]
        if self._kv.tiers is not None:
            self._kv.tiers.changed(held)

    # --- bringing the engine session to a beginning of the history ---

    def _reconcile(self, history: Sequence[HistoryItem]) -> Keep | TruncateTo | Rebuild:
        kv, has_feed = self._kv, self._thinker.feed is not None
        return reconcile(
            self.ledger,
            history,
            can_truncate=has_feed or kv.stateless,
            cuts_responses=(has_feed and kv.policies.truncate) or kv.stateless,
        )

    async def _hold_beginning(self, history: Sequence[HistoryItem]) -> bool:
        """Returns False if the engine session has to be built anew."""
        while True:
            match self._reconcile(history):
                case Keep(ledger):
                    self.ledger = ledger
                    return True
                case TruncateTo(ledger):
                    if not await self._truncate(ledger.n_tokens):
                        return False
                    self.ledger = ledger
                case Rebuild():
                    return False

    async def _truncate(self, n_tokens: int) -> bool:
        if self._kv.stateless:
            self.truncated(n_tokens)
            return True
        feed = self._thinker.feed
        assert feed is not None
        return await feed.truncate(self.held.session_id, n_tokens)

    async def _begin_anew(self, history: Sequence[HistoryItem], sizes: Mapping[str, Sizes]) -> None:
        """A new engine session, its header computed by itself, or with what the talker has."""
        thought, kv = self._thought, self._kv
        assert thought is not None
        thought.rebuilt = self._is_open or self._was_lost
        kv.n_rebuilt += any(item.role == "assistant" for item in history)
        self.lose()
        self._was_lost = False
        said: list[HistoryItem] = []
        if thought.request.window_tokens is None:
            known = takewhile(lambda i: i.token_ids is not None or i.key in self.told, history)
            said = [item for item in known]
            if said == list(history):
                said = said[:-1]
        if kv.stateless:
            self._open_ledger()
            return
        await self._ask()
        self._open_ledger()
        if said:
            whole = self._pieces(said, sizes)
            n_tokens = sum(piece.n_tokens for piece in whole)
            await self._prefill(Sizes(n_tokens, sum(piece.audio_s for piece in whole)))
            self._hold(said, sizes)
        else:
            await self._prefill_header()

    def _open_ledger(self) -> None:
        self._is_open = True
        self.ledger = Ledger(n_tokens=self._kv.header, n_header=self._kv.header)

    def _pieces(self, new: Sequence[HistoryItem], sizes: Mapping[str, Sizes]) -> list[Sizes]:
        """What each request appends: a message with a clip ends one."""
        pieces: list[Sizes] = []
        n_text, has_any = 0, bool(self.ledger.items)
        for item in new:
            size = sizes[item.key]
            n_tokens = size.n_tokens + self._end_tokens(item, has_any)
            has_any = True
            if size.audio_s:
                pieces.append(Sizes(n_text + n_tokens, size.audio_s))
                n_text = 0
            else:
                n_text += n_tokens
        return [*pieces, Sizes(n_text)] if n_text else pieces

    @staticmethod
    def _end_tokens(item: HistoryItem, has_any: bool) -> int:
        return END_MARKUP_TOKENS if has_any and item.token_ids is None else 0

    def _hold(
        self,
        new: Sequence[HistoryItem],
        sizes: Mapping[str, Sizes],
        *,
        speculative: bool = False,
    ) -> None:
        """The ledger has these items from now on; if speculative, the next history may not."""
        before, ends, has_any = self.ledger, list[int](), bool(self.ledger.items)
        end = before.n_tokens
        for item in new:
            size = sizes[item.key]
            first = end + self._end_tokens(item, has_any) + TURN_MARKUP_TOKENS // 2
            end += size.n_tokens + self._end_tokens(item, has_any)
            has_any = True
            ends.append(end)
            if size.audio_s:
                first -= self._kv.header + before.n_dropped
                n_audio = round(size.audio_s * AUDIO_TOKENS_PER_S)
                self._media.append((first, first + n_audio))
        held = before.after_turn(new, ends, begun_at=before.n_tokens, speculative=speculative)
        self.ledger = replace(held, n_tokens=end)

    # --- requests ---

    async def _ask(self) -> None:
        """Send a message, which the engine answers between two rounds."""
        events, host = self._thinker.events, self._thinker.host
        answered = asyncio.get_running_loop().create_future()

        def arrive() -> None:
            if not answered.done():
                answered.set_result(None)

        self._thinker.engine.post(lambda: events.after(host.answer_s, arrive))
        await answered

    async def _prefill_header(self) -> None:
        """In a request of its own, so that nothing else meets the radix tree: all but its last
        token is there."""
        self._header = self._new_request(Sizes(1), 0, is_header=True)
        await self._run(self._header)
        await self._thinker.events.sleep(self._thinker.host.result_s)

    async def _prefill(self, piece: Sizes) -> None:
        await self._run(self._new_request(piece, 0))
        await self._thinker.events.sleep(self._thinker.host.result_s)

    async def _generate(self, piece: Sizes, spec: TurnSpec) -> None:
        thought = self._thought
        assert thought is not None
        n_left = max(1, spec.n_tokens - len(thought.request.continues))
        req = self._new_request(piece, n_left)
        thought.rid = thought.generating = req.rid
        try:
            await self._run(req)
        except asyncio.CancelledError:
            if self._kv.stateless:
                self._hold_response(thought)
            raise
        finally:
            thought.generating = None
        self._hold_response(thought)

    def _hold_response(self, thought: Thought) -> None:
        n_tokens = self._kv.header + self.ledger.n_dropped + self.held.n_tokens
        self.ledger = replace(self.ledger, n_tokens=n_tokens).with_response(
            thought.request.item_key, thought.ids, model_wrote_end=False, opening_tokens=0
        )

    def _new_request(self, piece: Sizes, max_new: int, *, is_header: bool = False) -> Request:
        """Appends a piece, and computes what is missing of the KV before it."""
        thought, tiers, held, header = self._thought, self._kv.tiers, self.held, self._kv.header
        assert thought is not None
        on_host = 0 if tiers is None else tiers.on_host(held)
        n_cached = max(0, header - 1) if is_header else header + held.n_device + on_host
        n_prompt = header if is_header else header + held.n_tokens + piece.n_tokens
        rid = thought.new_rid()
        thought.n_prompt, thought.n_cached = n_prompt, thought.n_cached or n_cached
        background = thought.prefill_only
        return Request(
            rid=rid,
            prompt_tokens=n_prompt,
            cached_tokens=n_cached,
            max_new=max_new,
            reserve=max_new,
            audio_s=piece.audio_s,
            owner=self,
            keeps_prefix=True,
            load=tiers.load(held) if tiers is not None and on_host else None,
            managed=rid.startswith(HEARD_PREFIXES) and not background,
            background=background,
        )

    async def _run(self, req: Request) -> None:
        """Return when it has ended. Cancelled, it is aborted."""
        thinker, thought = self._thinker, self._thought
        assert thought is not None
        await thinker.events.sleep(thinker.host.features_per_s * req.audio_s)
        ended = self._ended = asyncio.get_running_loop().create_future()
        thought.prefilling = req.rid if thought.prefill_only else None
        thinker.engine.post(partial(thinker.add, req))
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            if not thinker.is_dead:
                thinker.abort(req)
                await ended
            raise
        finally:
            thought.prefilling = None
