"""How long a prefill may silence those who decode."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.pacing import latency_s
from sglang_live.policy.view import StageRates

from .views import NOW_S, nobody, paused, playing, policy_of, starting, view_of, waiting

POLICIES = policy_of(("urgency",))
CONFIG = POLICIES.config
RATES = StageRates(round_s=0.02, prefill_s_per_token=1e-3, prefill_s_fixed=0.05)
LATENCY_S = latency_s(RATES.round_s, CONFIG)


def budget(*streams, **other) -> int | None:
    return POLICIES.decide(view_of(*streams, **{"rates": RATES, **other})).prefill_budget


def test_a_prefill_ends_before_the_shortest_buffer_does():
    found = budget(playing(3.0), playing(LATENCY_S + 0.5), waiting())
    assert found == pytest.approx((0.5 - 0.02 - 0.05) / 1e-3, abs=1)


def test_with_nobody_to_silence_there_is_no_budget():
    assert budget(waiting()) is None
    assert budget(starting(), waiting()) is None
    assert budget(playing(0.1, managed=False), nobody(), waiting()) is None
    assert budget(playing(np.nan), waiting()) is None
    assert budget(playing(0.1, blocked=True), waiting()) is None


def test_slices_grow_with_the_wait_of_who_will_be_heard():
    nearly_dry, for_s = playing(0.1), 2.0
    assert budget(nearly_dry, waiting(for_s=for_s)) == 1000 * CONFIG.min_prefill_share * for_s
    assert budget(nearly_dry, waiting(for_s=for_s, managed=False)) == CONFIG.min_chunk_tokens


def test_who_is_about_to_begin_goes_before_what_nobody_will_hear():
    read = waiting(managed=False)
    assert budget(starting(), read) == 0
    assert budget(starting(buffered_s=LATENCY_S + 0.5), read) == pytest.approx(430, abs=1)
    assert budget(starting(), waiting(), read) is None  # somebody's first sound is first in line


def test_buffers_longer_than_a_chunk_of_the_engine_set_no_budget():
    assert budget(playing(LATENCY_S + 2.2), waiting()) is None


def test_who_sits_out_is_protected_too():
    assert budget(paused(LATENCY_S + 0.5), waiting()) is not None


def test_a_prefill_not_worth_a_round_waits_but_not_for_long():
    nearly_dry = playing(0.1)
    late = waiting(for_s=CONFIG.max_defer_s + 0.01, managed=False)
    assert budget(nearly_dry, waiting()) == 0
    assert budget(nearly_dry, waiting(for_s=CONFIG.max_defer_s - 0.01)) == 0
    assert budget(nearly_dry, late) == CONFIG.min_chunk_tokens
    fast = StageRates(round_s=0.02, prefill_s_per_token=1e-4)
    assert budget(nearly_dry, late, rates=fast) == 500  # a fifth of a quarter of a second


def test_a_prefill_that_takes_about_a_decode_round_is_not_put_off():
    slow = StageRates(round_s=0.06, prefill_s_per_token=5e-4)
    nearly_dry, short, long = playing(0.1), waiting(100), waiting(300)
    assert budget(nearly_dry, short, rates=slow) == 180  # one and a half rounds
    assert budget(nearly_dry, long, rates=slow) == 0
    assert budget(nearly_dry, waiting(100, managed=False), rates=slow) == 0
    # Decodes have their turn in between.
    assert budget(nearly_dry, short, rates=slow, last_prefill_s=NOW_S - 0.02) == 0
    assert budget(nearly_dry, short, rates=slow, last_prefill_s=NOW_S - 0.05) == 180


def test_after_a_slice_of_prefill_decodes_have_their_turn_again():
    nearly_dry, late = playing(0.1), waiting(for_s=3.0, managed=False)
    assert budget(nearly_dry, late, last_prefill_s=NOW_S - 0.1) == 0
    assert budget(nearly_dry, late, last_prefill_s=NOW_S - 0.3) == CONFIG.min_chunk_tokens


def test_a_prefill_half_way_is_cut_only_where_decodes_can_go_between():
    parks = policy_of(("urgency",), PolicyConfig(may_pause_prefill=True))
    partial_prefills = {"prefill_running": True, "rates": RATES, "last_prefill_s": NOW_S - 0.02}
    view = view_of(playing(0.1), **partial_prefills)
    assert parks.decide(view).prefill_budget == 0
    assert POLICIES.decide(view).prefill_budget is None


def test_a_prefill_that_nobody_decodes_beside_does_not_wait():
    pacing = policy_of(("urgency", "pacing"))
    alone = view_of(paused(0.75), nobody(), waiting(), rates=RATES)
    assert pacing.decide(alone).pause[0]
    assert pacing.decide(alone).prefill_budget >= CONFIG.min_chunk_tokens


def test_stock_order_protects_nobody():
    view = view_of(playing(0.1), waiting(), rates=RATES)
    assert policy_of(("fcfs",)).decide(view).prefill_budget is None


def test_pacing_protects_the_buffers_that_it_keeps_short():
    view = view_of(playing(0.1), waiting(), rates=RATES)
    assert policy_of(("fcfs", "pacing")).decide(view).prefill_budget == 0


@given(buffered_s=st.floats(0, 5), more_s=st.floats(0, 5))
def test_a_longer_buffer_never_means_a_smaller_budget(buffered_s, more_s):
    less, more = (
        CONFIG.chunk_tokens if found is None else found
        for found in (
            budget(playing(buffered_s), waiting()),
            budget(playing(buffered_s + more_s), waiting()),
        )
    )
    assert less <= more
