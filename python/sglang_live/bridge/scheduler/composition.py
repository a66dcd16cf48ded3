"""Which parts the scheduler of an engine has.

In: the engine's stage, the policies that are on, its memory. A policy that is off has no part.
"""

import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_live.bridge.rounds import Rounds, rounds_of
from sglang_live.bridge.scheduler.awaited_kv import AwaitedKv
from sglang_live.bridge.scheduler.best_effort import BestEffort
from sglang_live.bridge.scheduler.channel import Channel, SilentChannel
from sglang_live.bridge.scheduler.deciding import Deciding, Measuring
from sglang_live.bridge.scheduler.device_turns import Asking, ByTurns
from sglang_live.bridge.scheduler.interrupts import Interrupts
from sglang_live.bridge.scheduler.memory import Memory
from sglang_live.bridge.scheduler.part import Part
from sglang_live.bridge.scheduler.pausing import Pausing
from sglang_live.bridge.scheduler.request_log import RequestLog
from sglang_live.bridge.scheduler.retention import Retention
from sglang_live.bridge.scheduler.sessions import Sessions
from sglang_live.bridge.scheduler.slicing import Slicing
from sglang_live.bridge.scheduler.tiers import Tiers
from sglang_live.bridge.scheduler.watch import PROGRESS_ENV, ProgressCell, Watch
from sglang_live.engine_channel.device_turn import TURNS_ENV, DeviceTurn
from sglang_live.engine_channel.inbox import (
    PARTS_ENV,
    RADIX_BACKEND,
    STAGE_ENV,
    policies_from_env,
    policy_config_from_env,
)
from sglang_live.policy.config import TALKER, THINKER

if TYPE_CHECKING:
    from sglang_live.bridge.scheduler.live import LiveScheduler


def parts_of(scheduler: "LiveScheduler") -> tuple[Part, ...]:
    """In the order in which their hooks run."""
    policies = tuple(_of_policies(scheduler))
    return (
        *_of_talker(scheduler),
        *_of_bounded_sessions(scheduler),
        Memory(scheduler),
        Pausing(scheduler),
        *policies,
        (Channel if scheduler.is_first_rank else SilentChannel)(scheduler),
        Interrupts(scheduler),
        Sessions(scheduler),
        *_of_first_rank(scheduler),
        *_of_others(scheduler),
        *_of_shared_device(scheduler, policies),
    )


def _of_talker(scheduler: "LiveScheduler") -> Iterator[Part]:
    if _is_talker():
        # The thinker's process need not import it.
        from sglang_live.bridge.scheduler.talker import Talker, TalkerWindow

        talker = Talker(scheduler)
        yield talker
        yield TalkerWindow(scheduler, talker)


def _of_bounded_sessions(scheduler: "LiveScheduler") -> Iterator[Part]:
    if _is_bounded(scheduler):
        yield Retention(scheduler)


def _of_policies(scheduler: "LiveScheduler") -> Iterator[Part]:
    args, policies = scheduler.server_args, policies_from_env()
    config = policy_config_from_env(THINKER if _stage() == "thinker" else TALKER)
    rounds = rounds_of(policies, config, args.chunked_prefill_size)
    # A frame's KV comes from all of its codes, and from text.
    kv_by_tokens = not _is_talker()
    tiers = (Tiers(scheduler),) if _is_bounded(scheduler) else ()
    if rounds is None:
        yield from tiers
        return
    deciding = Deciding(scheduler, rounds, kv_by_tokens=kv_by_tokens)
    yield deciding
    if scheduler.is_first_rank:
        yield Measuring(scheduler, deciding)
    yield from tiers
    yield from _of_rounds(scheduler, rounds, kv_by_tokens)


def _of_rounds(scheduler: "LiveScheduler", rounds: Rounds, kv_by_tokens: bool) -> Iterator[Part]:
    args = scheduler.server_args
    has_host_tier = policies_from_env().next_use and args.enable_hierarchical_cache
    if _is_bounded(scheduler) and has_host_tier:
        yield AwaitedKv(scheduler, rounds)
    # SGLang limits the LoRA adapters of a batch, and with pipeline stages each microbatch has its
    # own half-prefilled prompt.
    if rounds.slices_prefill and not args.enable_lora and args.pp_size == 1:
        yield Slicing(scheduler, rounds)
    if rounds.tells_best_effort:
        yield BestEffort(scheduler, rounds, into_tree=kv_by_tokens)


def _of_first_rank(scheduler: "LiveScheduler") -> Iterator[Part]:
    if scheduler.is_first_rank:
        yield RequestLog(scheduler)
        if path := os.environ.get(PROGRESS_ENV):
            yield Watch(scheduler, ProgressCell(Path(path)))


def _of_others(scheduler: "LiveScheduler") -> Iterator[Part]:
    """Of extensions and laboratories, by name; each names a function of the scheduler."""
    for name in os.environ.get(PARTS_ENV, "").split(","):
        if name:
            yield pkgutil.resolve_name(name)(scheduler)


def _of_shared_device(scheduler: "LiveScheduler", policies: tuple[Part, ...]) -> Iterator[Part]:
    """Behind all that decide about rounds."""
    if path := os.environ.get(TURNS_ENV):
        by_turns = ByTurns(scheduler)
        yield by_turns
        if scheduler.is_first_rank:
            deciding = next((part for part in policies if isinstance(part, Deciding)), None)
            yield Asking(scheduler, by_turns, DeviceTurn(Path(path)), deciding)


def _is_bounded(scheduler: "LiveScheduler") -> bool:
    is_bounded: bool = scheduler.server_args.radix_cache_backend == RADIX_BACKEND
    return is_bounded


def _is_talker() -> bool:
    return _stage() == "talker"


def _stage() -> str:
    return os.environ[STAGE_ENV]
