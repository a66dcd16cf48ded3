"""Sessions on SGLang's own radix cache, pools and requests: who holds which KV, without a model."""

from array import array
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.io_struct import SessionParams, TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req
from sglang.srt.managers.scheduler_components.pool_stats_observer import kv_private_tokens
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.session.session_controller import Session

from sglang_live.bridge.cache.radix import LiveRadixCache
from sglang_live.bridge.session.compact import SessionCompaction
from sglang_live.kv.retention import RetentionConfig

PAGE, POOL_TOKENS, N_ROWS = 4, 256, 8
HEADER = range(1000, 1012)  # three pages


@pytest.fixture(autouse=True)
def plain_server(monkeypatch):
    off = SimpleNamespace(
        speculative_algorithm=None,
        strip_thinking_cache=False,
        disaggregation_decode_retraction_backup=None,
        disaggregation_mode="null",
    )
    for module in (common, schedule_batch):
        for name in ("get_spec", "get_serving", "get_disagg"):
            monkeypatch.setattr(module, name, lambda: off, raising=False)


class Engine:
    """Steps of SGLang's scheduler for one request at a time, on its own cache and pools."""

    def __init__(self, evicts: bool, core: str = "rust"):
        kv = MHATokenToKVPool(
            size=POOL_TOKENS,
            page_size=PAGE,
            dtype=torch.float16,
            head_num=1,
            head_dim=1,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
        )
        self.pool = PagedTokenToKVPoolAllocator(
            POOL_TOKENS,
            page_size=PAGE,
            dtype=torch.float16,
            device="cpu",
            kvcache=kv,
            need_sort=False,
        )
        self.rows = ReqToTokenPool(N_ROWS, 256, "cpu", enable_memory_saver=False)
        self.cache = LiveRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.pool,
                page_size=PAGE,
                tree_components=(ComponentType.FULL,),
                tree_core_backend=core,
            )
        )
        if evicts:
            self.cache.session.evicts_idle = True
        self._n_requests = 0

    def open(self) -> Session:
        self._n_requests += 1
        session = Session(0, f"session-{self._n_requests}", streaming=True)
        return session

    def admit(self, session: Session, ids, max_new_tokens: int = 3) -> Req:
        """Match, lock, allocate: a prefill of all new tokens."""
        self._n_requests += 1
        nothing = ("input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob")
        received = TokenizedGenerateReqInput(
            rid=f"turn-{self._n_requests}",
            input_text=None,
            input_ids=array("q", ids),
            sampling_params=SamplingParams(max_new_tokens=max_new_tokens),
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            stream=True,
            session_params=SessionParams(id=session.session_id),
            **dict.fromkeys(nothing),
        )
        req = session.create_req(received, None, 10_000)
        self.prefill(req)
        return req

    def prefill(self, req: Req) -> None:
        cache = self.cache
        req.init_next_round_input(cache)
        req.extend_end = len(req.full_untruncated_fill_ids)
        req.lock = cache.lock(req.last_node)
        if req.kv.holds_kv:
            prefix = self.rows.req_to_token[req.kv.req_pool_idx, : req.prefix_len].clone()
        elif req.prefix_len:
            prefix = cache.prefix_device_indices(req)
        else:
            prefix = torch.empty(0, dtype=torch.int64)
        self.rows.alloc([req])
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        row[: req.prefix_len] = prefix.to(row.dtype)
        self._extend(req, req.prefix_len, req.extend_end)
        cache.maybe_hand_to_session(req)

    def _extend(self, req: Req, begin: int, end: int) -> None:
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        first = -(-begin // PAGE) * PAGE
        for at in range(begin, min(first, end)):  # the rest of the last page
            row[at] = row[at - 1] + 1
        n_slots = -(-max(0, end - first) // PAGE) * PAGE
        missing = n_slots - self.pool.available_size()
        if missing > 0:
            self.cache.evict_for_alloc(EvictParams(num_tokens=missing))
        if n_slots:
            row[first : first + n_slots] = self.pool.alloc(n_slots).to(row.dtype)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end

    def checkpoint(self, req: Req) -> None:
        """After the prefill of a request that decodes."""
        common.checkpoint_kv_cache(req, self.cache)

    def decode(self, req: Req, n_tokens: int) -> None:
        for _ in range(n_tokens):
            req.output_ids.append(7)
            self._extend(req, req.kv.kv_committed_len, req.kv.kv_committed_len + 1)
        req.output_ids.append(7)

    def end(self, req: Req, reason) -> None:
        req.finished_reason = reason
        common.release_kv_cache(req, self.cache, checkpoint=True)

    def retract(self, req: Req) -> None:
        common.release_kv_cache(req, self.cache, checkpoint=False)
        req.reset_for_retract()

    def turn(self, session: Session, ids, max_new_tokens: int = 3) -> Req:
        req = self.admit(session, ids, max_new_tokens)
        if max_new_tokens:
            self.checkpoint(req)
            self.decode(req, max_new_tokens - 1)
        self.end(req, FINISH_LENGTH(max_new_tokens))
        return req

    def close(self, session: Session) -> None:
        self.cache.release_session(session.session_id)

    def check(self, *running: Req) -> None:
        """SGLang's pool check: every slot and row has one owner."""
        cache, records = self.cache, self.cache.session_records()
        held = sum(kv_private_tokens(kv, PAGE) for kv in records.values() if kv.holds_kv)
        own = [req for req in running if req.kv not in records.values()]
        counted = (
            self.pool.available_size()
            + cache.evictable_size()
            + cache.protected_size()
            + held
            + sum(kv_private_tokens(req.kv, PAGE) for req in own)
        )
        assert counted == POOL_TOKENS
        n_rows = sum(kv.holds_kv for kv in records.values()) + len(own)
        assert self.rows.available_size() + n_rows == N_ROWS

    def in_tree(self, ids) -> int:
        key = RadixKey(array("q", ids))
        return self.cache.tree_core.match_prefix(MatchPrefixParams(key=key)).device_prefix_len


@pytest.fixture(params=["rust", "python"])
def core(request) -> str:
    return request.param


@pytest.fixture(params=[True, False], ids=["evicts", "keeps"])
def engine(request, core) -> Engine:
    return Engine(request.param, core)


def test_sessions_share_the_instructions_alone(engine):
    first, second = engine.open(), engine.open()
    engine.turn(first, HEADER, max_new_tokens=0)
    engine.turn(first, range(10))
    engine.check()
    assert engine.in_tree([*HEADER, *range(10)]) == len(HEADER)
    req = engine.admit(second, HEADER, max_new_tokens=0)
    assert req.prefix_len == len(HEADER) - PAGE  # one token is always computed, and pages are whole
    engine.check(req)


def test_a_session_that_closes_leaves_all_memory(engine):
    session = engine.open()
    engine.turn(session, HEADER, max_new_tokens=0)
    engine.turn(session, range(10))
    engine.close(session)
    engine.check()
    assert engine.cache.protected_size() == 0
    assert engine.rows.available_size() == N_ROWS


def test_an_aborted_request_leaves_nothing_of_its_session_in_the_tree(engine):
    session = engine.open()
    engine.turn(session, HEADER, max_new_tokens=0)
    engine.turn(session, range(10))
    req = engine.admit(session, range(20, 40))
    engine.checkpoint(req)
    engine.decode(req, 2)
    engine.check(req)
    engine.end(req, FINISH_ABORT("user"))
    engine.check()
    assert session.session_id not in engine.cache.session.slots
    assert engine.in_tree(req.origin_input_ids) == len(HEADER)
    assert engine.cache.protected_size() == 0
    # The next request computes the last finished one's tokens again.
    engine.turn(session, range(50, 55))
    engine.check()


def test_a_request_that_is_retracted_twice_keeps_its_session_and_kv(engine):
    session = engine.open()
    engine.turn(session, HEADER, max_new_tokens=0)
    req = engine.admit(session, range(10), max_new_tokens=20)
    engine.checkpoint(req)
    for n_kept in (10, 13):
        engine.decode(req, 2)
        engine.retract(req)
        engine.check()
        assert req.session is session
        engine.prefill(req)
        engine.checkpoint(req)
        assert req.kv.kv_committed_len > len(HEADER) + n_kept
        engine.check(req)
    engine.end(req, FINISH_LENGTH(20))
    engine.check()


def test_the_first_request_may_be_retracted(engine):
    session = engine.open()
    req = engine.admit(session, HEADER, max_new_tokens=20)
    engine.checkpoint(req)
    engine.decode(req, 2)
    engine.retract(req)
    engine.check()
    engine.prefill(req)
    engine.end(req, FINISH_LENGTH(20))
    engine.turn(session, range(9))
    engine.check()


def test_a_session_without_a_row_continues_behind_its_prefix_in_the_tree():
    engine = Engine(evicts=True)
    session = engine.open()
    engine.turn(session, HEADER, max_new_tokens=0)
    engine.turn(session, range(30))
    cache, slot = engine.cache, engine.cache.session.slots[session.session_id]
    n_tokens = cache.session.idle.tokens
    assert cache.session.evict_idle(n_tokens) == n_tokens
    assert not slot.kv.holds_kv
    engine.check()
    req = engine.admit(session, range(40, 45))
    assert req.prefix_len == len(HEADER)
    row = engine.rows.req_to_token[req.kv.req_pool_idx]
    assert torch.equal(row[: len(HEADER)].long(), slot.kv.parked)
    engine.check(req)
    engine.end(req, FINISH_LENGTH(0))
    engine.check()


def test_a_session_is_not_evicted_while_its_request_runs():
    engine = Engine(evicts=True)
    session, other = engine.open(), engine.open()
    engine.turn(session, range(30))
    engine.turn(other, range(100, 120))
    req = engine.admit(session, range(40, 45))
    idle = engine.cache.session.idle
    assert session.session_id not in idle and other.session_id in idle
    engine.check(req)
    engine.cache.evict(EvictParams(num_tokens=POOL_TOKENS))
    assert req.kv.kv_allocated_len == 30 + 3 + 5 and not idle.tokens
    engine.check(req)


def test_compaction_unlocks_the_tree_behind_the_sink():
    engine = Engine(evicts=False)
    session = engine.open()
    engine.turn(session, range(40), max_new_tokens=0)
    engine.turn(session, range(100, 110))
    assert engine.cache.protected_size() == 40
    sessions = engine.cache.session
    sessions.compaction = SessionCompaction(sessions)
    sessions.compaction.rebase = SimpleNamespace(due=lambda *args: False, has_table=True)
    config = RetentionConfig(sink_tokens=8, window_tokens=8, slack_tokens=PAGE)
    compaction = sessions.compaction.compact(session, config)
    assert compaction.begin == 8 and compaction.n_tokens >= 32
    assert engine.cache.protected_size() == 8
    engine.check()
    engine.turn(session, range(200, 210))
    engine.check()
    engine.close(session)
    engine.check()
