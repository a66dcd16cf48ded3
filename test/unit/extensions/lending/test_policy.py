"""Claims about how much an engine lends and recalls."""

from dataclasses import replace

import pytest

from sglang_live.extensions.lending.policy import (
    LenderView,
    LendingConfig,
    Need,
    lendable,
    offer,
    reclaim,
    reserve,
    run_tokens,
)

CONFIG = LendingConfig()
RUN = 2048
IDLE = LenderView(
    total=32_768,
    free=32_768,
    evictable=0,
    leased=0,
    recalled=0,
    needed=0,
    longest_prompt=0,
    decoding=0,
    missing=0,
    since_recall_s=float("inf"),
)


def leasing(n_runs: int, **changes) -> LenderView:
    leased = n_runs * RUN
    return replace(IDLE, leased=leased, free=IDLE.total - leased, **changes)


def test_an_idle_pool_lends_all_but_its_reserve_and_its_prompts():
    assert offer(IDLE, RUN, CONFIG) == (32_768 - 4096 - 4096 - RUN) // RUN


def test_what_was_needed_within_the_window_is_not_lent():
    assert offer(replace(IDLE, needed=20_000), RUN, CONFIG) == 1
    assert offer(replace(IDLE, needed=24_000), RUN, CONFIG) == 0


def test_offering_again_and_again_ends_above_the_reserve():
    view, n = IDLE, 0
    while (more := offer(view, RUN, CONFIG)) > 0:
        n += more
        view = leasing(n)
    assert view.free >= reserve(view, CONFIG) + RUN
    assert reclaim(view, RUN, CONFIG) == 0


def test_a_pool_of_the_size_of_its_reserve_lends_nothing_ever():
    assert lendable(IDLE.total, RUN, CONFIG) == offer(IDLE, RUN, CONFIG) * RUN
    assert lendable(4096 + 256, 256, CONFIG) == 0
    assert lendable(4096, 0, CONFIG) == 0


def test_the_reserve_has_the_longest_prompt_and_a_step_of_each_request():
    view = replace(IDLE, longest_prompt=700, decoding=12)
    assert reserve(view, CONFIG) == 4096 + 700 + 12


def test_runs_are_recalled_when_the_reserve_is_touched():
    view = leasing(8, needed=16_000)
    low = replace(view, free=4000)
    assert reclaim(low, RUN, CONFIG) == 1
    assert reclaim(replace(low, free=0), RUN, CONFIG) == 2


def test_evictable_prompts_count_as_room():
    assert reclaim(replace(leasing(8), free=0, evictable=5000), RUN, CONFIG) == 0


def test_what_is_recalled_already_is_not_recalled_twice():
    low = replace(leasing(8), free=0)
    assert reclaim(replace(low, recalled=2 * RUN), RUN, CONFIG) == 0
    assert reclaim(replace(low, recalled=RUN), RUN, CONFIG) == 1


def test_a_refused_request_recalls_what_it_misses_although_the_reserve_is_whole():
    assert reclaim(leasing(4, missing=1), RUN, CONFIG) == 1
    assert reclaim(leasing(4, missing=RUN + 1), RUN, CONFIG) == 2
    assert reclaim(leasing(4, missing=RUN + 1, recalled=RUN), RUN, CONFIG) == 1
    assert reclaim(leasing(4, missing=RUN, recalled=RUN), RUN, CONFIG) == 0


def test_no_more_is_recalled_than_is_leased():
    assert reclaim(replace(leasing(1), free=0, longest_prompt=30_000), RUN, CONFIG) == 1
    assert reclaim(replace(IDLE, free=0), RUN, CONFIG) == 0


@pytest.mark.parametrize("change", [{"recalled": RUN}, {"missing": 1}, {"since_recall_s": 9.0}])
def test_nothing_is_offered_during_and_after_a_recall(change):
    assert offer(leasing(4), RUN, CONFIG) > 0
    assert offer(leasing(4, **change), RUN, CONFIG) == 0


@pytest.mark.parametrize(
    ("total", "bytes_per_token", "page", "tokens"),
    [(32_768, 512, 1, 2048), (2_200_000, 20_480, 1, 13_107), (1000, 512, 16, 48), (8, 512, 16, 0)],
)
def test_a_run_is_a_small_part_of_the_pool_in_whole_pages(total, bytes_per_token, page, tokens):
    assert run_tokens(total, bytes_per_token, page, CONFIG) == tokens


def test_need_is_the_maximum_of_the_last_minute():
    need = Need(CONFIG)
    need.observe(0.0, 100, 7)
    need.observe(1.0, 900, 30)
    need.observe(2.0, 50, 0)
    assert (need.held, need.prompt) == (900, 30)
    for second in range(3, 120):
        need.observe(float(second), 50, 1)
    assert (need.held, need.prompt) == (50, 1)


@pytest.mark.parametrize(
    "wrong", [{"window_s": 0}, {"cached_share": 1.0}, {"n_runs": 0}, {"calm_s": -1}]
)
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LendingConfig(**wrong)
