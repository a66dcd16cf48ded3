"""Log of every round's facts and decisions on each rank, for tests that compare the ranks.

A rank writes a line to its own file whenever something
has changed, with the number of the round; equal files mean equal decisions in every round. It reads
device memory, so it is for the CPU platform.
"""

import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import NextBatchPlan, Req

from sglang_live.bridge.scheduler.deciding import Deciding
from sglang_live.bridge.scheduler.interrupts import Interrupts
from sglang_live.bridge.scheduler.memory import Memory
from sglang_live.bridge.scheduler.part import Part
from sglang_live.bridge.scheduler.retention import Retention
from sglang_live.bridge.scheduler.sessions import Sessions
from sglang_live.engine_channel.inbox import PARTS_ENV, STAGE_ENV

ROUND_LOG_ENV = "LAB_ROUND_LOG"
# Measured by each rank's own clock, for reports alone.
_OWN_CLOCK = ("decide_s", "compact_s", "reload_s", "peer_reload_s")


def environment(folder: Path) -> dict[str, str]:
    return {PARTS_ENV: "lab.round_log:RoundLog", ROUND_LOG_ENV: str(folder)}


class RoundLog(Part):
    def __init__(self, scheduler: Any):
        super().__init__(scheduler)
        name = f"{os.environ[STAGE_ENV]}-rank{torch.distributed.get_rank()}.jsonl"
        path = Path(os.environ[ROUND_LOG_ENV]) / name
        self._file = path.open("w", buffering=1, encoding="utf-8")
        self._n_rounds = 0
        self._last: dict[str, Any] = {}

    def planned(self, plan: NextBatchPlan) -> None:
        self._n_rounds += 1
        facts = {"batch": self._batch(plan.batch_to_run), **self._queues(), **self._memory()}
        changed = {name: fact for name, fact in facts.items() if fact != self._last.get(name)}
        if changed or plan.batch_to_run is not None:
            self._last = facts
            self._file.write(json.dumps({"round": self._n_rounds, **changed}) + "\n")

    def _batch(self, batch: Any) -> dict[str, Any] | None:
        if batch is None:
            return None
        return {
            "mode": batch.forward_mode.name,
            "reqs": [(req.rid, *_tokens(req)) for req in batch.reqs],
            "rows": batch.req_pool_indices_cpu.tolist(),
            "lengths": batch.seq_lens_cpu.tolist(),
            "slots": _digest(batch.out_cache_loc.tolist()),
        }

    def _queues(self) -> dict[str, Any]:
        scheduler = self._scheduler
        facts = {
            "waiting": [req.rid for req in scheduler.waiting_queue],
            "running": [req.rid for req in scheduler.running_batch.reqs],
            "paused": list(scheduler.pausing.requests),
            "partial": [req.rid for req in scheduler.partial_prefills()],
            "sessions": _digest(sorted(scheduler.session_controller.sessions)),
        }
        for part in scheduler.parts:
            # The measured rates change for as long as an engine is idle.
            if isinstance(part, Deciding) and len(part.rounds.table):
                decision = part.rounds.last
                facts["decision"] = [
                    decision.urgency.tolist(),
                    decision.pause.tolist(),
                    decision.admit.tolist(),
                    decision.prefill_budget,
                ]
                facts["rates"] = repr(part.rounds.rates)
        return facts

    def _memory(self) -> dict[str, Any]:
        """Pool and tiers. The totals count evictions, compactions, copies and preloads."""
        scheduler = self._scheduler
        totals: dict[str, float] = {}
        for part in scheduler.parts:
            if isinstance(part, (Interrupts, Memory, Retention, Sessions)):
                totals |= part.totals()
        facts: dict[str, Any] = {
            "free": scheduler.token_to_kv_pool_allocator.available_size(),
            "rows": scheduler.req_to_token_pool.available_size(),
            "tree": scheduler.tree_cache.evictable_size(),
            "pool": scheduler.memory.state().total,
            "totals": {name: n for name, n in totals.items() if name not in _OWN_CLOCK},
        }
        sessions = getattr(scheduler.tree_cache, "session", None)
        if (tier := getattr(sessions, "tier", None)) is not None:
            facts["host"] = tier.copies.n_free_slots
        return facts


def _tokens(req: Req) -> tuple[int, int]:
    return len(req.output_ids), req.output_ids[-1] if req.output_ids else -1


def _digest(values: Iterable[Any]) -> int:
    return zlib.crc32(repr(values).encode())
