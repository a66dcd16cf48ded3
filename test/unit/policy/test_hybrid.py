"""Claims about best-effort work in a round."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.hybrid import in_order, retracted_first, without_best_effort
from sglang_live.policy.round_cost import RoundCost
from sglang_live.policy.view import BestEffort, StageRates, StageView

from .views import (
    NOW_S,
    Stream,
    few_examples,
    free_index,
    paused,
    playing,
    policy_of,
    same,
    starting,
    view_of,
    views,
    waiting,
)

HALF = PolicyConfig().changed({"best_effort.slack_share": 0.5, "best_effort.most_round_s": 0.15})
HYBRID = policy_of(("urgency", "pacing", "hybrid"), HALF)
CAPPED = policy_of(("urgency", "pacing", "bros"), HALF)
PLAIN = policy_of(("urgency", "pacing"))
# 2 ms and 1 ms for each stream; prefills 5 ms and 0.1 ms for each token.
COST = RoundCost(
    decode=(2e-3, 1e-3, 0.0),
    prefill=(5e-3, 1e-4, 0.0, 0.0, 0.0, 0.0),
    decode_error=0.0,
    prefill_error=0.0,
)
ROUND_S = 0.015
# What a listener's buffer is above this is slack: latency_s of the rates below.
LATENCY_S = 0.25 + 0.24 + ROUND_S


def best_effort(stream: Stream, **other) -> Stream:
    return replace(stream, managed=False, buffered_s=0.0, started=False, **other)


def running(**other) -> Stream:
    return best_effort(playing(0.0), **{"for_s": 0.1, **other})


def held(**other) -> Stream:
    return best_effort(paused(0.0), **{"for_s": 0.1, **other})


def queued(tokens: int = 1000, **other) -> Stream:
    return best_effort(waiting(tokens, kv_tokens=tokens), **other)


def with_class(view: StageView, which: list[int], **facts) -> StageView:
    n = len(view)
    mask = np.zeros(n, bool)
    mask[which] = True
    columns = {
        "half": np.zeros(n, bool),
        "deadline_s": np.full(n, np.inf),
        "group": np.arange(n),
        "cost": COST,
    }
    return replace(view, best_effort=BestEffort(which=mask, **{**columns, **facts}))


def mixed(others: list[Stream], own: list[Stream], view: dict | None = None, **facts) -> StageView:
    """Best-effort streams behind the others."""
    facts_of_view = {"rates": StageRates(round_s=ROUND_S), **(view or {})}
    made = view_of(*others, *own, **facts_of_view)
    return with_class(made, list(range(len(others), len(made))), **facts)


def n_decoding(policy, view: StageView) -> int:
    decided = policy.decide(view)
    can = view.best_effort.which & ~view.waiting
    return int(np.count_nonzero(can & ~decided.pause))


# --- without best effort ---


@few_examples
@given(view=views())
def test_a_stage_without_best_effort_decides_as_without_the_policy(view):
    assert same(HYBRID.decide(view), PLAIN.decide(view))
    assert same(CAPPED.decide(view), PLAIN.decide(view))


@few_examples
@given(view=views(), n=st.integers(1, 6), occupied=st.booleans())
def test_other_streams_have_the_round_that_they_would_have_alone(view, n, occupied):
    """Their classes, admission and pauses; memory that best effort holds is theirs."""
    mine = [running(kv_tokens=0) if occupied else queued() for _ in range(n)]
    extended = view_of(*mine)
    names = [f.name for f in fields(view) if isinstance(getattr(view, f.name), np.ndarray)]
    columns = {n: np.concatenate((getattr(view, n), getattr(extended, n))) for n in names}
    both = replace(view, **columns)
    both = with_class(both, list(range(len(view), len(both))), others_prefill=view.prefill_running)
    free_rows = view.free_rows + (n if occupied else 0)
    alone = PLAIN.decide(replace(view, free_rows=free_rows))
    decided = HYBRID.decide(both)
    assert np.array_equal(decided.pause[: len(view)], alone.pause)
    assert np.array_equal(decided.urgency[: len(view)], alone.urgency)
    assert np.array_equal(decided.admit[decided.admit < len(view)], alone.admit)
    if len(alone.admit) or view.prefill_running:
        assert decided.prefill_budget == alone.prefill_budget


def test_memory_of_best_effort_counts_as_free_for_others():
    view = mixed(
        [waiting(300)],
        [running(kv_tokens=400)],
        view={"free_tokens": 100, "free_rows": 0, "occupancy": 0.9},
        pool_tokens=1000,
    )
    seen = without_best_effort(view)
    assert (seen.free_tokens, seen.free_rows) == (500, 1)
    assert seen.occupancy == pytest.approx(0.5)
    assert HYBRID.decide(view).admit.tolist() == [0]


# --- decode ---


def test_without_listeners_best_effort_takes_what_a_first_sound_would_have_time_for():
    assert n_decoding(HYBRID, mixed([], [running() for _ in range(100)])) == 100
    # Half of 0.3 s: 148 streams at 1 ms.
    assert n_decoding(HYBRID, mixed([], [running() for _ in range(300)])) == 148


def test_best_effort_fits_half_of_the_smallest_slack():
    own = [running() for _ in range(40)]
    # Half of 60 ms: 2 ms, the listeners' two streams, and 26 more.
    view = mixed([playing(LATENCY_S + 0.06), playing(5.0)], own)
    assert n_decoding(HYBRID, view) == 26


def test_a_stream_whose_first_chunk_is_made_counts_by_its_buffer():
    own = [running() for _ in range(40)]
    # Its time to the first sound does not count any more.
    assert n_decoding(HYBRID, mixed([starting(age_s=0.1995)], own)) == 17
    made = mixed([starting(age_s=0.1995, buffered_s=LATENCY_S + 0.07)], own)
    assert n_decoding(HYBRID, made) == 31


def test_the_error_of_predictions_is_kept_as_a_margin():
    own = [running() for _ in range(40)]
    cost = replace(COST, decode_error=0.25)
    view = mixed([playing(LATENCY_S + 0.06), playing(5.0)], own, cost=cost)
    assert n_decoding(HYBRID, view) == 20
    # However large: a buffer of seconds covers rounds that take much longer than predicted.
    cost = replace(COST, decode_error=1.4)
    view = mixed([playing(LATENCY_S + 0.06), playing(5.0)], own, cost=cost)
    assert n_decoding(HYBRID, view) == 9
    many = [running() for _ in range(200)]
    assert n_decoding(HYBRID, mixed([playing(1.0)], many, cost=cost)) == 60


def test_predictions_whose_error_is_unknown_are_not_trusted_beside_listeners():
    cost = replace(COST, decode_error=math.inf, prefill_error=math.inf)
    view = mixed([playing(0.9)], [running(), queued()], cost=cost)
    decided = HYBRID.decide(view)
    assert decided.pause.tolist() == [False, True, False]
    assert decided.prefill_budget == 0
    alone = mixed([], [running(), queued()], cost=cost)
    assert not HYBRID.decide(alone).pause.any()
    assert HYBRID.decide(alone).prefill_budget > 0


def test_a_stream_on_its_way_to_its_first_sound_keeps_the_time_for_the_rounds_of_its_chunk():
    own = [running() for _ in range(100)]
    # 0.3 - 0.0945 s less four rounds, half of it: 72.7 ms.
    assert n_decoding(HYBRID, mixed([starting(age_s=0.0945)], own)) == 69
    # With a token of the four it has one round less to go.
    begun = replace(starting(age_s=0.0945), buffered_s=0.08)
    assert n_decoding(HYBRID, mixed([begun], own)) == 77
    assert n_decoding(HYBRID, mixed([starting(age_s=0.4)], own)) == 0
    # One that never sounds does not end best effort.
    assert n_decoding(HYBRID, mixed([starting(age_s=6.0)], own)) == 100


def test_an_unknown_buffer_is_not_protected():
    assert n_decoding(HYBRID, mixed([playing(np.nan)], [running()])) == 1


def test_streams_that_run_go_on_and_others_follow_by_expiry():
    own = [held(), held(), running(), held()]
    deadlines = np.array([np.inf, 30.0, 10.0, 20.0, 40.0])
    view = mixed([playing(LATENCY_S + 0.011)], own, deadline_s=deadlines)
    assert HYBRID.decide(view).pause.tolist() == [False, True, False, False, True]


# --- starvation ---


def test_streams_that_were_held_for_long_step_in_turn():
    own = [held(for_s=2.5) for _ in range(32)]
    view = mixed([playing(LATENCY_S)], own)
    assert n_decoding(HYBRID, view) == 4
    assert n_decoding(HYBRID, mixed([playing(LATENCY_S)], own[:3])) == 1


def test_beside_a_stream_that_may_fall_silent_they_wait_longer():
    dry = [playing(0.1)]
    assert n_decoding(HYBRID, mixed(dry, [held(for_s=9.0)])) == 0
    assert n_decoding(HYBRID, mixed(dry, [held(for_s=10.5)])) == 1


@pytest.mark.parametrize(("buffered_s", "waited_s"), [(LATENCY_S, 2.5), (0.1, 10.5)])
def test_a_prompt_that_has_waited_for_long_gets_a_slice(buffered_s, waited_s):
    view = mixed([playing(buffered_s)], [queued(for_s=waited_s)])
    decided = HYBRID.decide(view)
    assert (decided.admit.tolist(), decided.prefill_budget) == ([1], 64)
    recent = replace(view.best_effort, last_prefill_s=NOW_S - 1.0)
    assert HYBRID.decide(replace(view, best_effort=recent)).prefill_budget == 0


# --- prefill ---


def test_a_prompt_takes_what_fits_the_slack():
    # Half of 100 ms less 5 ms, at 0.1 ms a token.
    view = mixed([playing(LATENCY_S + 0.1)], [queued()])
    assert HYBRID.decide(view).prefill_budget == pytest.approx(450, abs=1)
    assert HYBRID.decide(mixed([playing(LATENCY_S + 0.02)], [queued()])).prefill_budget == 0
    assert HYBRID.decide(mixed([], [queued()])).prefill_budget == pytest.approx(1450, abs=1)


def test_prefills_of_best_effort_alternate_with_decodes_of_heard_streams():
    view = mixed([playing(0.9)], [queued()], view={"decoded_since_prefill": False})
    assert HYBRID.decide(view).prefill_budget == 0
    # Nothing that is heard decodes in this round.
    far = mixed([paused(20.0)], [queued()], view={"decoded_since_prefill": False})
    assert HYBRID.decide(far).prefill_budget > 0


def test_other_prompts_go_before_best_effort():
    for other in (waiting(), waiting(managed=False)):
        decided = HYBRID.decide(mixed([other], [queued()]))
        assert decided.admit.tolist() == [0]
    # A prompt without a listener is promoted after some time, best effort is not.
    view = mixed([waiting(for_s=0.1)], [queued(for_s=60.0)])
    assert HYBRID.decide(view).admit.tolist() == [0]


def test_a_half_prefilled_prompt_is_requeue_for_another_prompt():
    half = np.array([False, True])
    view = mixed([waiting()], [running()], view={"prefill_running": True}, half=half)
    decided = HYBRID.decide(view)
    assert decided.requeue.tolist() == [False, True]
    assert decided.admit.tolist() == [0]
    alone = mixed([playing(3.0)], [running()], view={"prefill_running": True}, half=half)
    decided = HYBRID.decide(alone)
    assert decided.requeue is None
    assert decided.prefill_budget is None or decided.prefill_budget > 0


def test_it_is_not_requeue_in_a_round_whose_prefill_is_put_off():
    half = np.array([False, False, True])
    others = [playing(0.3), waiting(5000, managed=False, for_s=0.0)]
    view = mixed(others, [running()], view={"prefill_running": True}, half=half)
    decided = HYBRID.decide(view)
    assert decided.prefill_budget == 0
    assert decided.requeue is None


def test_best_effort_leaves_the_kv_of_idle_sessions_with_room_to_decode():
    own, more = [queued(300), queued(300), queued(300)], PolicyConfig().best_effort.growth_tokens
    room = 600 + 2 * more
    assert len(HYBRID.decide(mixed([], own, free_tokens=room)).admit) == 2
    assert len(HYBRID.decide(mixed([], own, free_tokens=room - 1)).admit) == 1
    assert len(HYBRID.decide(mixed([], [*own, running()], free_tokens=room)).admit) == 1
    assert len(HYBRID.decide(mixed([], [*own, running()], free_tokens=room + more)).admit) == 2
    no_sessions = {"view": {"free_tokens": 600}, "free_tokens": 600}
    assert len(HYBRID.decide(mixed([], own, **no_sessions)).admit) == 2
    assert len(HYBRID.decide(mixed([], own, free_tokens=0)).admit) == 1
    assert len(HYBRID.decide(mixed([], [*own, running()], free_tokens=0)).admit) == 0


def test_batches_that_expire_first_go_first_and_then_prompts_that_begin_alike():
    own = [queued(age_s=age_s) for age_s in (5.0, 4.0, 3.0, 2.0, 1.0)]
    deadline_s = np.array([90.0, 90.0, 90.0, 90.0, 10.0])
    view = mixed([], own, deadline_s=deadline_s, group=np.array([1, 2, 1, 2, 3]))
    assert in_order(view, view.best_effort.which).tolist() == [4, 0, 2, 1, 3]


def test_the_stream_that_is_served_last_retracted_first_first():
    own = [running(age_s=3.0), running(age_s=2.0), held(age_s=9.0), running(age_s=1.0), queued()]
    half = np.array([False, False, False, True, False])
    deadlines = np.array([np.inf, 5.0, np.inf, np.inf, np.inf])
    view = mixed([], own, half=half, deadline_s=deadlines)
    assert retracted_first(view).tolist() == [3, 2, 0, 1]


# --- BROS's cap ---


def test_the_cap_doubles_without_urgent_streams_and_falls_back_at_once():
    own = [running() for _ in range(200)]
    calm = mixed([playing(5.0)], own, cap=128)
    assert n_decoding(CAPPED, calm) == 128
    assert CAPPED.decide(calm).cap == 256
    # 131 ms against a slack of 25.
    urgent = mixed([starting(age_s=0.2)], own, cap=512)
    assert CAPPED.decide(urgent).cap == 128
    assert n_decoding(CAPPED, urgent) == 200


def test_the_cap_alone_does_not_bound_prompts():
    view = mixed([playing(LATENCY_S)], [queued()])
    assert CAPPED.decide(view).prefill_budget is None


def test_both_bounds_together_take_the_smaller_one():
    both = policy_of(("urgency", "pacing", "hybrid", "bros"), HALF)
    own = [running() for _ in range(40)]
    assert n_decoding(both, mixed([playing(LATENCY_S + 0.06)], own, cap=10)) == 10
    assert n_decoding(both, mixed([playing(LATENCY_S + 0.061)], own, cap=64)) == 27


def test_a_free_index_is_no_best_effort():
    view = mixed([free_index()], [running()])
    assert HYBRID.decide(view).pause.tolist() == [False, False]
