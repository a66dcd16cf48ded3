"""A thinker's engine without a model: SGLang's streaming sessions as lists of token ids."""

from collections.abc import Callable
from types import SimpleNamespace

from sglang_live.messages import Retained, RetainSession, UserSpeaking
from sglang_live.models.demo.build import build_tokenizer
from sglang_live.models.qwen3_omni.parts import ChatPrompt

TOKENIZER = build_tokenizer(1024)
END_ID = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
PAD_ID = TOKENIZER.convert_tokens_to_ids("<|audio_pad|>")
PROMPT = ChatPrompt(
    SimpleNamespace(
        placeholders={PAD_ID}, end_of_turn_ids=(END_ID,), script_style=None, gives_up=""
    ),
    TOKENIZER,
)
N_PLACES = 3  # per clip


class FakeEngine:
    """In place of an EngineHost, and of a session's way to the scheduler.

    reply: what it generates, with the end token.
    refuses: it does not truncate, and does not answer to a bound. Nor does it truncate to where it
        has dropped tokens.
    before_request, before_token: called with the rid, and with the number of the token.
    left_after_eviction: tokens of KV that every session has left at most.
    answers: whether it tells how much KV a session has.
    speaking: sessions whose users were reported to speak. rids: of all requests.
    promoted: requests for which a turn waits.
    n_prefilled: tokens that requests have appended. salts: of each request.
    """

    def __init__(self, reply: list[int] | None = None):
        self.reply = reply or [5, 6, 7, END_ID]
        self.sessions: dict[str, list[int]] = {}
        self.refuses = False
        self.cuts: dict[str, tuple[int, int]] = {}  # sink and tokens cut, by session
        self.truncations: list[int] = []
        self.bounds: list[RetainSession] = []
        self.left_after_eviction = 1 << 30
        self.answers = True
        self.speaking: list[str] = []
        self.rids: list[str] = []
        self.promoted: list[str] = []
        self.before_request: Callable[[str], None] = lambda rid: None
        self.before_token: Callable[[int], None] = lambda n: None
        self.n_prefilled = 0
        self.salts: list[str | None] = []
        self.engine = SimpleNamespace(tokenizer_manager=self)
        self._ended: set[str] = set()

    @property
    def tokens(self) -> list[int]:
        """Of the only session there is."""
        [tokens] = self.sessions.values()
        return tokens

    # --- an EngineHost ---

    async def open_session(self, request, _) -> None:
        self.sessions[request.session_id] = []

    async def close_session(self, request, _) -> None:
        del self.sessions[request.session_id]

    async def stream(self, rid: str, *, sampling_params, session_params, **content):
        self.before_request(rid)
        self.rids.append(rid)
        self.salts.append(content.get("cache_salt"))
        tokens = self.sessions[session_params["id"]]
        new = content.get("input_ids") or _expanded(content["prompt"])
        tokens += new
        self.n_prefilled += len(new)
        n_prompt, ids = len(tokens), []
        for n, token in enumerate(self.reply[: sampling_params["max_new_tokens"]]):
            self.before_token(n)
            if rid in self._ended:
                break
            ids.append(token)
            if token != END_ID:
                yield _chunk(ids, n_prompt, None)
        tokens += ids
        yield _chunk(ids, n_prompt, "stop" if ids[-1:] == [END_ID] else "length")

    async def run(self, rid: str, **request) -> dict:
        return [chunk async for chunk in self.stream(rid, **request)][-1]

    # --- a ThinkerFeed ---

    def interrupt(self, rid: str) -> None:
        self._ended.add(rid)

    def promote(self, rid: str) -> None:
        self.promoted.append(rid)

    def hint(self, hint: UserSpeaking) -> None:
        self.speaking.append(hint.session_id)

    async def kv_held(self, engine_session: str) -> int | None:
        """All but the newest token, or what is left after an eviction."""
        held = len(self.sessions[engine_session]) - 1
        return min(held, self.left_after_eviction) if self.answers else None

    async def truncate(self, engine_session: str, n_tokens: int) -> bool:
        self.truncations.append(n_tokens)
        if self.refuses:
            return False
        tokens = self.sessions[engine_session]
        sink, n_dropped = self.cuts.get(engine_session, (0, 0))
        if sink < n_tokens < sink + n_dropped:
            return False  # what lies there was dropped
        place = n_tokens if n_tokens <= sink else n_tokens - n_dropped
        assert 0 < place < len(tokens)
        del tokens[place:]
        return True

    def tell_bound(self, order: RetainSession, *, running: str = "") -> None:
        if not running:
            self.bounds.append(order)

    async def retain(self, order: RetainSession) -> Retained | None:
        if self.refuses:
            return None
        tokens = self.sessions[order.session_id]
        sink, n_dropped = order.sink_tokens, len(tokens) - order.sink_tokens - order.window_tokens
        del tokens[sink : sink + n_dropped]
        _, before = self.cuts.get(order.session_id, (0, 0))
        self.cuts[order.session_id] = sink, before + n_dropped
        return Retained(order.session_id, len(tokens), *self.cuts[order.session_id])


def _expanded(text: str) -> list[int]:
    ids = PROMPT.markup_ids(text)
    return [id for id in ids for _ in range(N_PLACES if id == PAD_ID else 1)]


def _chunk(ids: list[int], n_prompt: int, finish: str | None) -> dict:
    return {
        "output_ids": list(ids),
        "text": "".join(f" {token}" for token in ids if token != END_ID),
        "meta_info": {
            "prompt_tokens": n_prompt,
            "cached_tokens": 0,
            "finish_reason": {"type": finish} if finish else None,
        },
    }
