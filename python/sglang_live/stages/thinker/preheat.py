"""Preheat: KV that a conversation lacks is computed while its user speaks.

A new session lacks its instructions'. Later KV is lost with the engine's process, by an aborted
request, or by eviction from every tier. The next turn would compute it before its first token; at
the beginning of speech there is time, behind all requests that a user waits for (LiveServe, arXiv
2606.22983, section 3).
Owner: one Preheats per thinker stage.
"""

from collections.abc import Sequence
from typing import Literal

from sglang_live.core import HistoryItem
from sglang_live.messages import UserSpeaking
from sglang_live.stages.thinker.ledger import LEAST_PREHEAT_TOKENS, Rebuild, reconcile
from sglang_live.stages.thinker.session import ThinkerSession, TurnState

# "session": there is no engine session, or it has to be built anew. "kv": it is there, and its KV
# is evicted.
Loss = Literal["nothing", "session", "kv"]


async def loss(
    session: ThinkerSession, instructions: str, history: Sequence[HistoryItem], drops_oldest: bool
) -> Loss:
    """What is lost of the history's KV. Where it only has to be truncated, nothing is."""
    ledger, feed = session.ledger, session.feed
    if session.engine_session is None or instructions != session.instructions:
        return "session"
    left_out = ledger.left_out if drops_oldest else frozenset()
    known = [item for item in history if item.key not in left_out]
    cuts_responses = feed is not None and session.truncates
    step = reconcile(ledger, known, can_truncate=feed is not None, cuts_responses=cuts_responses)
    if isinstance(step, Rebuild):
        return "session"
    if feed is None:
        return "nothing"
    held = await feed.kv_held(session.engine_session)
    is_lost = held is not None and ledger.n_resident - held >= LEAST_PREHEAT_TOKENS
    return "kv" if is_lost else "nothing"


async def compute_evicted(session: ThinkerSession, state: TurnState) -> None:
    """Have the engine compute KV that it has evicted. The engine session then holds what it held.

    A request cannot be empty: it appends markup, which is truncated again.
    """
    before = session.ledger
    [markup] = session.prompt.appends(session.prompt.open_response())
    done = False
    try:
        await session.prefill(markup, state)
        done = await session.truncate(before)
    finally:
        if not done and session.engine_session is not None:
            await session.lose()


class Preheats:
    """The preheats of a stage's sessions.

    counts: `preheats` have opened an engine session or built it anew, `preheats_evicted` have
        computed evicted KV; for `preheats_needless` nothing was missing; after `preheats_unused` of
        them the next turn had to build the session anew all the same, or there was none.
    """

    def __init__(self) -> None:
        names = ("preheats", "preheats_evicted", "preheats_needless", "preheats_unused")
        self.counts = dict.fromkeys(names, 0.0)
        self._unused: set[str] = set()  # ids of sessions

    async def begin(
        self,
        session: ThinkerSession,
        instructions: str,
        history: Sequence[HistoryItem],
        drops_oldest: bool,
        state: TurnState,
    ) -> bool:
        """Returns True if the history is to be prefilled now, as by a turn."""
        lost = await loss(session, instructions, history, drops_oldest)
        if lost == "nothing":
            self.counts["preheats_needless"] += 1
            return False
        self._unused.add(session.session_id)
        if lost == "session":
            self.counts["preheats"] += 1
            return True
        self.counts["preheats_evicted"] += 1
        await compute_evicted(session, state)
        return False

    def ended(self, session: ThinkerSession) -> None:
        """A preheat has ended, and the user still speaks: the KV is not evicted next."""
        if session.feed is not None and session.engine_session is not None:
            session.feed.hint(UserSpeaking(session.engine_session))

    def used(self, session_id: str, rebuilt: bool) -> None:
        """A turn of the session has begun. rebuilt: it had to build the engine session anew."""
        if session_id in self._unused:
            self._unused.discard(session_id)
            self.counts["preheats_unused"] += rebuilt

    def closed(self, session_id: str) -> None:
        self.used(session_id, rebuilt=True)
