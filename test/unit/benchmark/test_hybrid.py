"""Claims about the comparison of speech beside best-effort work, in small runs."""

from dataclasses import replace
from functools import cache

import pytest

from benchmark.hybrid.arms import ARMS
from benchmark.hybrid.coarse_device import coarse_device
from benchmark.hybrid.conversations import at_once
from benchmark.hybrid.engine import EngineSize
from benchmark.hybrid.listeners import AUDIBLE_GAP_S, LEAD_S, TPOT_S, Job, Record
from benchmark.hybrid.run import Run, RunConfig, run
from benchmark.hybrid.workload import Work, Workload
from sglang_live.extensions.planner.device_model.costs import ThinkerCosts
from sglang_live.extensions.planner.device_model.model import H100, H200, load_device_model
from sglang_live.extensions.planner.simulation.events import Events

SMALL = EngineSize(pool_tokens=60_000, rows=64, chunk_tokens=2048)


@cache
def costs() -> ThinkerCosts:
    return load_device_model(H200).thinker


@cache
def made(arm: str, per_s: float = 2.0, n_best_effort: int = 64, size: EngineSize = SMALL) -> Run:
    config = RunConfig(
        arm=arm,
        per_s=per_s,
        n_best_effort=n_best_effort,
        duration_s=30.0,
        seed=3,
        costs=costs(),
        size=size,
    )
    return run(config, Workload.load("tune", "voice"))


def test_the_parts_share_no_length_and_runs_of_a_seed_have_the_same_turns():
    tune, held_out = (Workload.load(part, "voice") for part in ("tune", "held_out"))
    assert abs(len(tune.heard) - len(held_out.heard)) <= 1
    assert tune.turns(3.0, 60.0, 1) == tune.turns(3.0, 60.0, 1) != tune.turns(3.0, 60.0, 2)
    n = len(tune.turns(3.0, 600.0, 1))
    assert n == pytest.approx(1800, rel=0.15)
    assert tune.turns(0.0, 60.0, 1) == []


def test_a_session_has_its_conversation_and_a_chat_computes_it():
    [voice, chat] = (Workload.load("tune", kind).turns(3.0, 20.0, 1) for kind in ("voice", "chat"))
    assert all(turn.audio_s and turn.prompt_tokens - turn.cached_tokens >= 8 for turn in voice)
    assert all(not turn.cached_tokens for turn in chat)


@pytest.mark.parametrize("arm", ARMS)
def test_no_memory_or_row_is_lost(arm):
    engine = made(arm).engine
    assert 0 < engine.pool.used == engine.held_tokens <= engine.pool.total
    assert 0 < engine.pool.rows_used <= engine.pool.rows


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_serves_both(arm):
    outcome = made(arm).outcome
    assert outcome.n > 10 and outcome.be_tokens_per_s > 1000
    assert 0 <= outcome.attained <= 1


def test_best_effort_work_before_them_delays_listeners_without_an_order():
    large = EngineSize(pool_tokens=400_000)
    alone = made("fcfs", n_best_effort=0)
    fcfs, priority = (made(arm, n_best_effort=256, size=large) for arm in ("fcfs", "priority"))
    assert alone.outcome.ttft_p99_s < 0.1 and alone.outcome.attained == 1.0
    assert fcfs.outcome.ttft_p50_s > 10 * priority.outcome.ttft_p50_s
    assert priority.outcome.attained < alone.outcome.attained, "prefills stop the voices"


def test_the_paper_takes_memory_for_listeners_and_loads_it_again():
    tight = replace(SMALL, rows=6)
    bros = made("bros", size=tight)
    assert bros.engine.counts.retracted > 0
    assert bros.engine.counts.recomputed_tokens < bros.engine.counts.retracted * 1000


def test_the_paper_with_bounded_prefills_delays_listeners_less():
    large = EngineSize(pool_tokens=400_000)
    letter, bounded = (made(arm, n_best_effort=256, size=large) for arm in ("bros", "bros-bounded"))
    assert bounded.outcome.attained > letter.outcome.attained
    assert bounded.outcome.be_tokens_per_s > 1000


def test_the_policy_keeps_what_is_heard_as_it_is_without_best_effort():
    alone, hybrid = made("live", n_best_effort=0), made("hybrid")
    assert hybrid.outcome.attained == alone.outcome.attained == 1.0
    assert hybrid.outcome.ttft_p99_s < 0.3
    assert hybrid.outcome.be_tokens_per_s > made("live", per_s=0.0).outcome.be_tokens_per_s / 4


def test_a_share_of_the_tokens_costs_as_much_on_a_coarse_device(tmp_path):
    fine, coarse = load_device_model(H100), load_device_model(coarse_device(H100, 4, tmp_path))
    assert coarse.thinker.prefill_s(250, 2.0) == pytest.approx(fine.thinker.prefill_s(1000, 2.0))
    assert coarse.thinker.decode_s(8, 2500) == pytest.approx(fine.thinker.decode_s(8, 10_000))
    assert coarse.thinker.kv_token_bytes == 4 * fine.thinker.kv_token_bytes
    assert (coarse.talker, coarse.vocoder, coarse.link) == (fine.talker, fine.vocoder, fine.link)


def test_turns_need_as_many_conversations_as_play_at_the_same_time():
    # A response of 50 tokens plays until 5 s after its request.
    turns = [Work(at_s, 100, 50, cached_tokens=90) for at_s in (0.0, 4.0, 4.5, 7.0)]
    assert at_once(turns) == 3
    assert at_once(turns[:1]) == 1
    assert at_once([]) == 0


def test_a_run_is_repeatable():
    config = RunConfig(
        arm="bros", per_s=2.0, n_best_effort=32, duration_s=20.0, seed=5, costs=costs(), size=SMALL
    )
    workload = Workload.load("tune", "voice")
    assert run(config, workload).outcome == run(config, workload).outcome


def test_a_token_after_its_time_is_a_gap_also_if_it_never_comes():
    events = Events()
    record = Record(events, warm_s=0.0)
    in_time, late, never = (Job(Work(0.0, 10, 3), True, 0.0) for _ in range(3))
    record.jobs = [in_time, late, never]

    def tokens(job: Job, *at_s: float) -> None:
        for time_s in at_s:
            events.at(time_s, lambda: record.outputs([job.request(0)]))

    second_s = 0.1 + LEAD_S + TPOT_S
    tokens(in_time, 0.1, second_s + 0.05, second_s + TPOT_S)
    tokens(late, 0.1, second_s + AUDIBLE_GAP_S + 0.05)
    tokens(never, 0.1)
    events.run(5.0)
    in_time.done_s = second_s + TPOT_S
    outcome = record.outcome(until_s=5.0, tail_s=0.0, busy_s=1.0)
    assert outcome.continuous == outcome.attained == pytest.approx(1 / 3)
