"""Prefills that are put off while most of their KV is loaded, because decodes run meanwhile.

SGLang loads a host hit layer by layer within the prefill, and every request of the engine waits for
layers that arrive more slowly than they compute. Where that would be noticed, as much is loaded
before the prefill that it hides the rest.
Owner: one AwaitedKv per scheduler with a host tier whose policies decide about rounds. All inputs
are equal on all ranks.
"""

import math
from typing import TYPE_CHECKING

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.utils.common import ceil_align

from sglang_live.bridge.round_facts import LinkRate
from sglang_live.bridge.rounds import Rounds
from sglang_live.bridge.scheduler.batch_times import audio_s_of
from sglang_live.bridge.scheduler.part import Part, Prefill
from sglang_live.bridge.scheduler.tiers import LOADING_WAIT_S
from sglang_live.bridge.tiers.host import SessionTier
from sglang_live.kv.layered_load import LayeredLoad
from sglang_live.kv.preload import PROTECTED_S

if TYPE_CHECKING:
    from sglang_live.bridge.scheduler.live import LiveScheduler


class AwaitedKv(Part):
    def __init__(self, scheduler: "LiveScheduler", rounds: Rounds):
        super().__init__(scheduler)
        self._rounds = rounds
        # Waiting requests that have been put off, and since when; None: they can begin.
        self._since_s: dict[str, float | None] = {}
        self._counts = {"prefills_awaited_kv": 0.0, "prefills_awaited_kv_s": 0.0}

    def totals(self) -> dict[str, float]:
        return self._counts

    def wait_limit_s(self) -> float:
        return self.idle_limit_s()

    def idle_limit_s(self) -> float:
        awaits_any = any(since_s is not None for since_s in self._since_s.values())
        return LOADING_WAIT_S if awaits_any else math.inf

    def narrow(self, prefill: Prefill) -> None:
        prefill.narrow(*self.ready(prefill.queue, prefill.running))

    def ready(self, waiting: list[Req], running: list[Req]) -> tuple[list[Req], list[Req]]:
        """The waiting requests that can begin, and those that wait for KV.

        Args:
            running: requests that decode meanwhile.
        """
        if self._since_s:
            waits = {req.rid for req in waiting}
            self._since_s = {rid: since for rid, since in self._since_s.items() if rid in waits}
        ready: list[Req] = []
        loading: list[Req] = []
        for req in waiting:
            awaits = req.session is not None and (
                self._still_awaits(req) if req.rid in self._since_s else self._begin(req, running)
            )
            (loading if awaits else ready).append(req)
        return ready, loading

    def _still_awaits(self, req: Req) -> bool:
        since_s = self._since_s[req.rid]
        if since_s is None:
            return False
        if self._tier.all.is_loading(req.session.session_id):
            return True
        # Not a second time, should it be evicted meanwhile.
        self._since_s[req.rid] = None
        self._counts["prefills_awaited_kv_s"] += self._rounds.now_s - since_s
        return False

    def _begin(self, req: Req, running: list[Req]) -> bool:
        """Begin to load the request's KV if its prefill should wait. Returns whether it waits."""
        session_id, tier = req.session.session_id, self._tier
        n_tokens = tier.loads.tokens_to_preload(session_id)
        rate = self._rate(session_id)
        if not running or not n_tokens or rate.bytes_per_s is None:
            return False
        load = self._load(req, n_tokens, rate.bytes_per_s, rate.latency_s)
        if not self._is_noticed(load.stall_s, running) or not self._fits(req, running):
            return False
        n_before = n_tokens - load.hidden_bytes // tier.copies.bytes_per_token
        page_size, now_s = self._scheduler.page_size, self._rounds.now_s
        sessions = self._scheduler.tree_cache.session
        # First, so that the room is not made of the session's own part on the device.
        sessions.idle.protect(session_id, now_s + PROTECTED_S)
        if not tier.loads.load_now(session_id, ceil_align(max(1, n_before), page_size)):
            return False
        sessions.resized(session_id)
        sessions.idle.protect(session_id, now_s + PROTECTED_S)
        self._since_s[req.rid] = now_s
        self._counts["prefills_awaited_kv"] += 1
        return True

    def _load(self, req: Req, n_tokens: int, bytes_per_s: float, latency_s: float) -> LayeredLoad:
        tier, rates = self._tier, self._rounds.rates
        n_prompt, n_new = len(req.origin_input_ids), self._scheduler.memory.tokens_to_prefill(req)
        audio_s = audio_s_of(req, max(0, n_prompt - n_new), n_prompt)
        queued = tier.all.bytes_in_transfer(tier.is_nearer(req.session.session_id))
        return LayeredLoad(
            n_bytes=n_tokens * tier.copies.bytes_per_token,
            n_layers=tier.loads.n_layers,
            bytes_per_s=bytes_per_s,
            queue_s=latency_s + queued / bytes_per_s,
            encoder_s=audio_s * rates.encoder_s_per_audio_s,
            compute_s=rates.prefill_s_fixed + n_new * rates.prefill_s_per_token,
        )

    def _is_noticed(self, stall_s: float, running: list[Req]) -> bool:
        """Whether a wait of all running requests is longer than a round, by which any prefill
        delays them, and than their listeners' buffers last."""
        if stall_s <= self._rounds.rates.round_s:
            return False
        return stall_s > self._rounds.slack_of(req.rid for req in running)

    def _fits(self, req: Req, running: list[Req]) -> bool:
        """Whether the request could begin: KV that waits for memory is not loaded for it."""
        memory = self._scheduler.memory
        return memory.fits(req, running, memory.state().free)

    def _rate(self, session_id: str) -> LinkRate:
        return self._tier.all.rates[self._tier.is_nearer(session_id)]

    @property
    def _tier(self) -> SessionTier:
        tier: SessionTier = self._scheduler.tree_cache.session.tier
        return tier
