"""How long a prefill may delay decoding streams."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.prefill import slack_s
from sglang_live.policy.view import StageRates

from .views import NOW_S, free_index, paused, playing, policy_of, starting, view_of, waiting

POLICIES = policy_of(("urgency",))
CONFIG = POLICIES.config
RATES = StageRates(round_s=0.02, prefill_s_per_token=1e-3, prefill_s_fixed=0.05)
LATENCY_S = CONFIG.stage.latency_s(RATES.round_s)


def budget(*streams, **other) -> int | None:
    return POLICIES.decide(view_of(*streams, **{"rates": RATES, **other})).prefill_budget


def test_a_prefill_ends_before_the_shortest_buffer_does():
    found = budget(playing(3.0), playing(LATENCY_S + 0.5), waiting())
    assert found == pytest.approx((0.5 - 0.02 - 0.05) / 1e-3, abs=1)


def test_the_encoder_takes_its_part_of_the_shortest_buffer():
    rates = replace(RATES, encoder_s_per_audio_s=0.02)
    said = waiting(audio_s=8.0)
    found = budget(playing(LATENCY_S + 0.5), said, rates=rates)
    assert found == pytest.approx((0.5 - 0.02 - 0.05 - 0.16) / 1e-3, abs=1)
    # It has heard the clip when the prefill began, and waits no longer.
    config = CONFIG.changed({"stage.may_pause_prefill": True})
    view = view_of(playing(LATENCY_S + 0.5), rates=rates, prefill_running=True)
    found = policy_of(("urgency",), config).decide(view).prefill_budget
    assert found == pytest.approx((0.5 - 0.02 - 0.05) / 1e-3, abs=1)


def n_begun(*streams, config=CONFIG, **other) -> int:
    rates = replace(RATES, prefill_s_per_token=1e-4, encoder_s_per_audio_s=0.02)
    view = view_of(*streams, **{"rates": rates, **other})
    return len(policy_of(("urgency",), config).decide(view).admit)


def test_no_more_clips_are_encoded_than_the_shortest_buffer_covers():
    said = [waiting(100, audio_s=8.0, age_s=9.0 - n) for n in range(4)]  # 0.17 s each
    heard = playing(LATENCY_S + 0.5)  # 0.43 s are left, 0.05 s of them the fixed cost
    assert n_begun(heard, *said) == 2
    assert n_begun(*said) == 4  # there are no listeners
    # The first one begins however long it takes, and prompts without audio beside it.
    read, long = waiting(100, age_s=8.5), waiting(100, audio_s=30.0, age_s=9.5)
    assert n_begun(heard, long, *said) == 1
    assert n_begun(heard, said[0], read, *said[1:]) == 3
    assert n_begun(heard, long, prefill_running=True) == 1  # no decode can run before its end
    parks = CONFIG.changed({"stage.may_pause_prefill": True})
    assert n_begun(heard, long, prefill_running=True, config=parks) == 0


def test_clips_of_listeners_that_take_little_begin_together_whatever_the_buffers():
    short = [waiting(100, audio_s=1.0, age_s=9.0 - n) for n in range(9)]  # 0.03 s each
    assert n_begun(playing(0.1), *short) == (CONFIG.prefill.unnoticed_s - 0.05) // 0.03 == 5


def test_a_short_prompt_with_much_audio_is_not_short():
    rates = replace(RATES, prefill_s_fixed=0.0, encoder_s_per_audio_s=0.02)
    short = waiting(10)
    assert budget(playing(0.1), short, rates=rates) > 0
    assert budget(playing(0.1), replace(short, audio_s=8.0), rates=rates) == 0


def test_without_a_stream_that_can_fall_silent_there_is_no_budget():
    assert budget(waiting()) is None
    assert budget(starting(), waiting()) is None
    assert budget(playing(0.1, managed=False), free_index(), waiting()) is None
    assert budget(playing(np.nan), waiting()) is None
    assert budget(playing(0.1, blocked=True), waiting()) is None


def test_slices_grow_with_the_wait_of_a_listener():
    nearly_dry, for_s = playing(0.1), 2.0
    assert budget(nearly_dry, waiting(for_s=for_s)) == 1000 * CONFIG.prefill.min_share * for_s
    assert budget(nearly_dry, waiting(for_s=for_s, managed=False)) == CONFIG.stage.min_chunk_tokens


def test_a_stream_about_to_sound_goes_before_a_prompt_without_a_listener():
    read = waiting(managed=False)
    assert budget(starting(), read) == 0
    assert budget(starting(buffered_s=LATENCY_S + 0.5), read) == pytest.approx(430, abs=1)
    assert budget(starting(), waiting(), read) is None  # a first sound is next


def test_buffers_longer_than_a_chunk_of_the_engine_set_no_budget():
    assert budget(playing(LATENCY_S + 2.2), waiting()) is None


def test_tokens_without_a_measured_cost_need_no_slices():
    free = StageRates(round_s=0.02, prefill_s_per_token=0.0)
    for prompt in (waiting(100), waiting(100, for_s=3.0)):
        assert budget(playing(0.1), prompt, rates=free) >= CONFIG.stage.chunk_tokens
    assert budget(playing(3.0), waiting(100), rates=free) is None


def test_a_paused_stream_is_protected_as_well():
    assert budget(paused(LATENCY_S + 0.5), waiting()) is not None


def test_a_small_budget_defers_the_prefill_for_a_limited_time():
    nearly_dry = playing(0.1)
    late = waiting(400, for_s=CONFIG.prefill.max_defer_s + 0.01)
    assert budget(nearly_dry, waiting()) == 0
    assert budget(nearly_dry, waiting(400, for_s=CONFIG.prefill.max_defer_s - 0.01)) == 0
    assert budget(nearly_dry, late) == CONFIG.stage.min_chunk_tokens
    fast = StageRates(round_s=0.02, prefill_s_per_token=1e-4)
    read = waiting(400, for_s=CONFIG.prefill.max_defer_s + 0.01, managed=False)
    assert budget(nearly_dry, read, rates=fast) == 500  # a fifth of a quarter of a second


def test_a_prefill_is_deferred_for_as_long_as_it_takes_at_most():
    nearly_dry, tokens = playing(0.1), 10
    limit_s = CONFIG.prefill.defer_costs * (
        RATES.prefill_s_fixed + tokens * RATES.prefill_s_per_token
    )
    assert limit_s < CONFIG.prefill.max_defer_s
    assert budget(nearly_dry, waiting(tokens, for_s=limit_s - 0.01)) == 0
    assert budget(nearly_dry, waiting(tokens, for_s=limit_s + 0.01)) > 0
    # A long clip takes longer, and may wait longer.
    rates = replace(RATES, encoder_s_per_audio_s=0.02)
    heard = waiting(tokens, audio_s=8.0, for_s=limit_s + 0.01)
    assert budget(nearly_dry, heard, rates=rates) == 0


def test_a_prefill_that_takes_about_a_decode_round_is_not_deferred():
    slow = StageRates(round_s=0.06, prefill_s_per_token=5e-4)
    nearly_dry, short, long = playing(0.1), waiting(100), waiting(300)
    assert budget(nearly_dry, short, rates=slow) == 180  # one and a half rounds
    assert budget(nearly_dry, long, rates=slow) == 0
    assert budget(nearly_dry, waiting(100, managed=False), rates=slow) == 0
    # A decode round runs in between.
    assert budget(nearly_dry, short, rates=slow, decoded_since_prefill=False) == 0


def test_after_a_slice_of_prefill_decodes_run_again():
    nearly_dry, late = playing(0.1), waiting(400, for_s=0.3)
    assert budget(nearly_dry, late, last_prefill_s=NOW_S - 0.1) == 0
    assert budget(nearly_dry, late, last_prefill_s=NOW_S - 0.3) == CONFIG.stage.min_chunk_tokens


def test_a_half_done_prefill_is_deferred_only_where_decodes_can_run_in_between():
    parks = policy_of(("urgency",), PolicyConfig().changed({"stage.may_pause_prefill": True}))
    partial_prefill = {"prefill_running": True, "rates": RATES, "last_prefill_s": NOW_S - 0.02}
    view = view_of(playing(0.1), **partial_prefill)
    assert parks.decide(view).prefill_budget == 0
    assert POLICIES.decide(view).prefill_budget is None


def test_a_prefill_without_decodes_beside_it_does_not_wait():
    pacing = policy_of(("urgency", "pacing"))
    alone = view_of(paused(0.75), free_index(), waiting(), rates=RATES)
    assert pacing.decide(alone).pause[0]
    assert pacing.decide(alone).prefill_budget >= CONFIG.stage.min_chunk_tokens


def test_earlier_stages_are_told_when_the_first_listener_hears_a_gap():
    def told(*streams) -> float:
        return POLICIES.decide(view_of(*streams, rates=RATES)).until_gap_s

    assert told(playing(3.0), playing(LATENCY_S + 0.5), waiting()) == pytest.approx(0.48)
    assert told(playing(0.1), playing(3.0)) == 0.0
    assert told(starting(), playing(0.1, managed=False), playing(np.nan), free_index()) == np.inf


def test_stock_order_protects_no_stream():
    view = view_of(playing(0.1), waiting(), rates=RATES)
    assert policy_of(("fcfs",)).decide(view).prefill_budget is None


def test_pacing_protects_the_buffers_that_it_keeps_short():
    view = view_of(playing(0.1), waiting(), rates=RATES)
    assert policy_of(("fcfs", "pacing")).decide(view).prefill_budget == 0


@given(buffered_s=st.floats(0, 5), more_s=st.floats(0, 5))
def test_a_longer_buffer_never_means_a_smaller_budget(buffered_s, more_s):
    less, more = (
        CONFIG.stage.chunk_tokens if found is None else found
        for found in (
            budget(playing(buffered_s), waiting()),
            budget(playing(buffered_s + more_s), waiting()),
        )
    )
    assert less <= more


# --- boundaries ---

# All of them are sums of powers of two, so that sums are exact.
EXACT = PolicyConfig().changed({"stage.step_s": 0.0625, "stage.pipeline_s": 0.25})
EXACT_RATES = StageRates(round_s=2**-6, prefill_s_per_token=2**-10, prefill_s_fixed=2**-5)
NEEDED_S = EXACT.stage.latency_s(2**-6) + 2**-6 + 2**-5


def exact_budget(*streams, config=EXACT, rates=EXACT_RATES, **other) -> int | None:
    policy = policy_of(("urgency",), config)
    return policy.decide(view_of(*streams, rates=rates, **other)).prefill_budget


def test_a_buffer_of_the_engines_chunk_sets_no_budget_and_less_does():
    assert exact_budget(playing(NEEDED_S + 2.0), waiting()) is None
    assert exact_budget(playing(NEEDED_S + 2.0 - 2**-10), waiting()) == 2047


def test_the_smallest_budget_that_is_worth_a_round_is_used():
    assert exact_budget(playing(NEEDED_S + 2**-4), waiting(900)) == 64
    assert exact_budget(playing(NEEDED_S + 2**-4 - 2**-10), waiting(900)) == 0


def test_a_deferred_prefill_is_computed_after_the_bound_and_not_at_it():
    assert exact_budget(playing(0.1), waiting(900, for_s=0.25)) == 0
    assert exact_budget(playing(0.1), waiting(900, for_s=0.25 + 2**-10)) == 64


def test_a_stream_with_one_token_of_kv_is_a_decode():
    assert exact_budget(playing(0.1, kv_tokens=1), waiting(900)) == 0
    assert exact_budget(playing(0.1, kv_tokens=0), waiting(900)) == 64


def test_a_short_prefill_takes_as_long_as_the_bound_and_no_longer():
    rates = StageRates(round_s=2**-4, prefill_s_per_token=2**-10, prefill_s_fixed=2**-5)
    assert exact_budget(playing(0.1), waiting(64), rates=rates) == 96
    assert exact_budget(playing(0.1), waiting(65), rates=rates) == 0


def test_a_short_prefill_has_the_least_budget_at_least():
    slow = StageRates(round_s=0.06, prefill_s_per_token=1e-2, prefill_s_fixed=0.01)
    assert budget(playing(0.1), waiting(1), rates=slow) == CONFIG.stage.min_chunk_tokens


def test_a_half_done_prefill_is_never_short():
    config = PolicyConfig().changed({"stage.may_pause_prefill": True})
    slow = StageRates(round_s=0.06, prefill_s_per_token=5e-4)
    running = {"prefill_running": True, "last_prefill_s": NOW_S - 0.05, "rates": slow}
    assert exact_budget(playing(0.1), waiting(100), config=config, **running) == 0


def test_the_wait_of_a_half_done_prefill_is_that_since_its_last_slice():
    config = PolicyConfig().changed({"stage.may_pause_prefill": True})
    running = {"prefill_running": True, "rates": RATES}
    old = waiting(900, for_s=5.0, managed=False)
    for since_s, found in ((0.2, 0), (0.3, 64)):
        last_s = NOW_S - since_s
        assert (
            exact_budget(playing(0.1), old, config=config, last_prefill_s=last_s, **running)
            == found
        )
        assert exact_budget(playing(0.1), config=config, last_prefill_s=last_s, **running) == found


def test_a_deferred_prefill_takes_no_more_than_the_engines_chunk():
    fast = StageRates(round_s=0.02, prefill_s_per_token=1e-5)
    late = waiting(9000, for_s=3.0, managed=False)
    assert budget(playing(0.1), late, rates=fast) == CONFIG.stage.chunk_tokens


def test_without_a_short_prefill_there_is_no_budget_of_even_one_token():
    config = PolicyConfig().changed({"stage.min_chunk_tokens": 1})
    slow = StageRates(round_s=0.06, prefill_s_per_token=5e-4)
    for prompt, decoded in (
        (waiting(100, managed=False), True),
        (waiting(300), True),
        (waiting(100), False),
    ):
        streams = playing(0.1), prompt
        last = {"last_prefill_s": NOW_S - 0.1, "decoded_since_prefill": decoded}
        given = {"rates": slow, **last}
        assert exact_budget(*streams, config=config, **given) == 0


def test_speech_that_is_ahead_is_slack_and_nothing_else_is():
    view = view_of(
        *(playing(LATENCY_S + 0.5), playing(LATENCY_S - 0.5), playing(np.nan)),
        *(playing(9.0, managed=False), starting(buffered_s=9.0)),
        rates=RATES,
    )
    assert slack_s(view, CONFIG.stage).tolist() == pytest.approx([0.5 - 0.02, 0.0, 0.0, 0.0, 0.0])
