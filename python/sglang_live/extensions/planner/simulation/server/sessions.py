"""What the thinker's engine and the talker keep of each conversation between turns, in tokens.

As stages/thinker/ledger.py decides: a session's KV stays; a response of which less was heard than
generated is truncated with the policy `truncate`, and otherwise the session is built anew; with
`retention` the middle is dropped (kv/retention.py). Of stateless clients (ServerSpec) the radix
tree keeps what a session would.
"""

from dataclasses import dataclass

from sglang_live.extensions.planner.simulation.engine.pool import KvPool
from sglang_live.extensions.planner.simulation.server.session import (
    History,
    Piece,
    Session,
    without_first,
    without_last,
)
from sglang_live.extensions.planner.simulation.server.tiers import Tiers
from sglang_live.kv.retention import RetentionConfig, compaction_of, media_after
from sglang_live.policy.policies import Policies

# Markup of Qwen3-Omni around a user's clip and before the response, and behind a response; prompt
# positions of the talker before its first frame (models/speech_lm/talker_ids.py).
TURN_MARKUP_TOKENS, END_MARKUP_TOKENS, TALKER_PREFIX_TOKENS = 9, 2, 9
AUDIO_TOKENS_PER_S = 12.5


@dataclass(frozen=True, slots=True)
class Prompt:
    """A turn's requests to the thinker. Tokens without the instructions'.

    n_cached: with KV on the device, or on the host.
    pieces: to compute, each in a request of its own; the response follows the last one.
    n_user: tokens of the user's message alone.
    is_new: the instructions are computed in a request of their own. With `preheat` those of a
        session without a conversation are computed while its user speaks, and it is not new; the
        device's time for them is left out.
    truncates: the engine's session is truncated first, or opened.
    """

    n_cached: int
    pieces: tuple[Piece, ...]
    n_user: int
    is_new: bool
    truncates: bool

    @property
    def n_new(self) -> int:
        return sum(piece.n_tokens for piece in self.pieces)


def prompt_of_post(audio_s: float) -> Prompt:
    """Of a message that begins and ends a conversation."""
    n_user = round(audio_s * AUDIO_TOKENS_PER_S) + TURN_MARKUP_TOKENS
    piece = Piece(n_user, audio_s)
    return Prompt(n_cached=0, pieces=(piece,), n_user=n_user, is_new=True, truncates=False)


class Sessions:
    """
    Args:
        header: tokens of the instructions, which all sessions share in the radix tree.
        tiers: None: KV stays on the device until its session is closed.
        stateless: see ServerSpec.
    """

    def __init__(
        self,
        pool: KvPool,
        policies: Policies,
        header: int,
        tiers: Tiers | None,
        *,
        stateless: bool = False,
    ):
        self._pool = pool
        self._policies = policies
        self.header = header
        self.tiers = tiers
        self._stateless = stateless
        self._retention = RetentionConfig(sink_tokens=header)
        self.n_rebuilt = 0

    def resume(self, session: Session, history: History) -> None:
        """The new session has been going on for a while."""
        session.pieces = [Piece(history.n_tokens)]
        session.talker_prompt = history.n_user
        if not history.has_kv:
            return
        self._pool.take(history.n_tokens)
        session.n_tokens = session.n_device = history.n_tokens
        if self.tiers is not None:
            self.tiers.end(session)

    def close(self, session: Session) -> None:
        self.lose(session)
        session.is_closed = True

    def prompt(self, session: Session, audio_s: float) -> Prompt:
        """The prompt of the next turn; its user message joins the history.

        A conversation whose KV was lost is computed in one request, and its audio is encoded again;
        the turn's own message is another one. What was evicted is computed with that.
        """
        n_audio = round(audio_s * AUDIO_TOKENS_PER_S)
        n_user = n_audio + TURN_MARKUP_TOKENS
        before, n_cached = session.history, session.n_device
        n_end = END_MARKUP_TOKENS if before else 0
        if self.tiers is not None:
            self.tiers.begin(session)
            n_cached += self.tiers.on_host(session)
        is_new = session.n_tokens == 0
        truncates = session.is_cut
        session.is_cut = False
        own, lost = Piece(n_end + n_user, audio_s), list[Piece]()
        if is_new and before:
            self.n_rebuilt += 1
            session.media = []
            session.n_tokens = before
            lost = [Piece(before, sum(piece.audio_s for piece in session.pieces))]
        elif n_cached < session.n_tokens:
            own = Piece(session.n_tokens - n_cached + own.n_tokens, audio_s)
        first = session.n_tokens + n_end + TURN_MARKUP_TOKENS // 2
        session.media.append((first, first + n_audio))
        session.pieces = [*session.pieces, Piece(n_end + n_user, audio_s)]
        window = self._retention.window_tokens if self._policies.retention else 1 << 30
        session.talker_prompt = min(session.talker_prompt + n_user, window)
        if self._stateless:
            truncates = is_new = False
        needs_header = is_new and not lost and not self._policies.preheat
        truncates = bool(lost) or (truncates and not is_new)
        return Prompt(n_cached, (*lost, own), n_user, needs_header, truncates)

    def ended(self, session: Session, n_tokens: int, n_response: int, *, aborted: bool) -> None:
        """The turn's request has ended, and holds n_tokens, n_response of them its output."""
        session.n_tokens = session.n_device = n_tokens
        if n_response:
            session.pieces = [*session.pieces, Piece(n_response)]
        if session.is_closed or (aborted and not self._stateless):
            self.lose(session)
            return
        self._compact(session)
        if self.tiers is not None:
            self.tiers.end(session)

    def heard(self, session: Session, n_response: int, n_heard: int) -> None:
        """The user has heard the first n_heard tokens of a response, and will not hear the rest."""
        unheard = n_response - n_heard
        session.pieces = without_last(session.pieces, unheard)
        if not unheard or not session.n_tokens:
            return
        if self._policies.truncate or self._stateless:
            session.is_cut = True
            self._shorten(session, min(unheard, session.n_tokens))
        else:
            self.lose(session)

    def _shorten(self, session: Session, n_tokens: int) -> None:
        """Drop n_tokens, of those on the device if they are."""
        session.n_tokens -= n_tokens
        over = max(0, session.n_device - session.n_tokens)
        session.n_device -= over
        self._pool.release(over)
        if self.tiers is not None:
            self.tiers.changed(session)

    def lose(self, session: Session) -> None:
        """Forget its KV; its next turn prefills the conversation again."""
        self._pool.release(session.n_device)
        session.n_tokens = session.n_device = 0
        if self.tiers is not None:
            self.tiers.forget(session)

    def _compact(self, session: Session) -> None:
        if not self._policies.retention:
            return
        header = self.header
        media = [(first + header, behind + header) for first, behind in session.media]
        found = compaction_of(
            n_tokens=session.n_tokens + header,
            sink_tokens=header,
            window_tokens=self._retention.window_tokens,
            page_size=1,
            owned_from=header,
            media=media,
            slack_tokens=self._retention.slack_tokens,
        )
        if found is not None:
            session.pieces = without_first(session.pieces, found.n_tokens)
            kept = media_after(found, media)
            session.media = [(first - header, behind - header) for first, behind in kept]
            self._shorten(session, found.n_tokens)
