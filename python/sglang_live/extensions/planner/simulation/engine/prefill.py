"""Which prompts an engine prefills in a round: SGLang's PrefillAdder, by the policies' order.

In: the queue, the decision of the round, the pool. Out: requests and how many tokens of each. One
prompt at most is half-prefilled (SGLang's chunked_req); with `urgency` decodes go first between two
slices of it as in bridge/scheduler/slicing.py. That a shorter prompt preempts a longer one
is not modelled: it concerns prompts of thousands of tokens.
"""

from sglang_live.bridge.batch_work import BatchWork
from sglang_live.bridge.rounds import FIRST_TOKENS, Rounds
from sglang_live.extensions.planner.device_model.costs import EngineCosts
from sglang_live.extensions.planner.simulation.engine.pool import KvPool
from sglang_live.extensions.planner.simulation.engine.requests import Request

# SGLang's estimate of what running requests will still decode, as a share of what they may: it
# falls from the first value to the second within this number of decode rounds.
_FIRST_RATIO, _LEAST_RATIO, _DECAY_ROUNDS = 0.7, 0.098, 600

Items = list[tuple[Request, int]]


class Prefill:
    """
    Attributes:
        chunk_tokens: most tokens of a round; 0: it has no prefill.
        partial: the half-prefilled prompt.
        ratio: share of what running requests may still decode that is reserved for them.
        is_full: a request found no room, and none has left since.
    """

    def __init__(self, chunk_tokens: int, pool: KvPool, rounds: Rounds | None):
        self.chunk_tokens = chunk_tokens
        self._pool = pool
        self._rounds = rounds
        self.ratio = _FIRST_RATIO
        self._sliced_s = 0.0
        self._decodes_next = False
        self.partial: Request | None = None
        self.is_full = False

    def choose(
        self, waiting: list[Request], running: list[Request], reserved: float
    ) -> tuple[Items, list[Request]]:
        """Returns the prefill, empty if there is none, and the requests that stay in the queue.

        reserved: tokens that stay free for the responses of others.
        """
        if not waiting and self.partial is None:
            return [], waiting
        queue: list[Request] = waiting
        later: list[Request] = []
        budget = None
        if self._rounds is not None:
            queue, later = self._rounds.admission_order(waiting)
            budget = self._rounds.prefill_budget()
        if 0 in (budget, self.chunk_tokens) or self._decodes_go_first(running):
            return [], waiting
        chunk = self.chunk_tokens
        if budget is not None:
            chunk = min(chunk, budget)
            queue, beyond = _audio_within(budget, queue)
            later = beyond + later
        if not running:
            self.is_full = False
        if (self.is_full or not queue) and self.partial is None:
            return [], waiting
        items = self._fill(queue, self._pool.free - reserved, chunk)
        taken = {req.rid for req, _ in items}
        return items, [req for req in (*queue, *later) if req.rid not in taken]

    def launched(self, req: Request, n_tokens: int) -> None:
        """Account for n_tokens of a request's prompt that are computed now."""
        if not req.computed:
            req.kv = req.cached_tokens
            self._pool.rows_used += 1
            if not req.keeps_prefix:
                self._pool.take(req.cached_tokens)
        self._pool.take(n_tokens)
        req.computed += n_tokens
        req.kv += n_tokens

    def decoded(self) -> None:
        """A decode round was launched."""
        step = (_FIRST_RATIO - _LEAST_RATIO) / _DECAY_ROUNDS
        self.ratio = max(self.ratio - step, _LEAST_RATIO)
        self._decodes_next = False

    def _decodes_go_first(self, running: list[Request]) -> bool:
        rounds, partial = self._rounds, self.partial
        if rounds is None or partial is None or not rounds.slices_prefill:
            return False
        live = [req for req in running if not req.is_finished]
        idle_s = rounds.now_s - self._sliced_s
        is_silent = any(req.n_out < min(FIRST_TOKENS, req.max_new) for req in live)
        if is_silent and idle_s < rounds.config.slicing.max_preempt_s:
            return True
        return self._decodes_next and any(not rounds.is_well_buffered(r.rid) for r in live)

    def _fill(self, queue: list[Request], room: float, chunk: int) -> Items:
        items: Items = []
        partial = self.partial
        self.partial = None
        if partial is not None:
            n_tokens = min(partial.left_to_prefill, chunk)
            items.append((partial, n_tokens))
            chunk -= n_tokens
            if n_tokens < partial.left_to_prefill:
                self.partial = partial
        rows = self._pool.free_rows
        for req in queue:
            if chunk <= 0:
                break
            n_tokens = req.left_to_prefill
            own = 0 if req.keeps_prefix else req.cached_tokens
            needed = own + n_tokens + req.reserved
            if rows <= 0 or needed >= room:
                self.is_full = True
                break
            rows, room = rows - 1, room - needed
            if n_tokens > chunk:
                if self.partial is not None:
                    break
                self.partial = req
                n_tokens = chunk
            items.append((req, n_tokens))
            chunk -= n_tokens
        if self._rounds is not None and self.partial is not None:
            self._sliced_s = self._rounds.now_s
        self._decodes_next = self.partial is not None
        return items


def _audio_within(budget: int, queue: list[Request]) -> tuple[list[Request], list[Request]]:
    """As in bridge/scheduler/slicing.py: all audio of a prompt is encoded at once."""
    n_sum, has_audio = 0, False
    for at, req in enumerate(queue):
        n_sum += req.left_to_prefill
        if not req.audio_s:
            continue
        if has_audio and n_sum > budget:
            return queue[:at], queue[at:]
        has_audio = True
    return queue, []


def prefill_cost_s(items: Items, costs: EngineCosts) -> tuple[float, BatchWork]:
    """Returns the duration, and the sizes."""
    n_all, audio_s, n_pairs, n_context, n_squared = 0, 0.0, 0, 0, 0
    for req, n_tokens in items:
        before = req.cached_tokens + req.computed
        n_all += n_tokens
        n_pairs += n_tokens * before + n_tokens * (n_tokens + 1) // 2
        n_context += n_tokens * before
        n_squared += n_tokens * n_tokens
        audio_s += 0.0 if req.computed else req.audio_s
    work = BatchWork(
        0,
        n_tokens=n_all,
        audio_s=audio_s,
        n_pairs=n_pairs,
        n_context=n_context,
        n_squared=n_squared,
    )
    return costs.prefill_s(n_all, audio_s), work
