"""Claims about what engines say of best-effort work."""

from sglang_live.capacity.best_effort import BestEffort, used_share


def test_engines_are_counted_together_and_paused_requests_wait():
    thinker = {"policy_be_running": 5.0, "policy_be_paused": 2.0, "policy_be_waiting": 3.0}
    talker = {"policy_be_running": 1.0}
    told = BestEffort.of([thinker, {"streams": 1.0}, talker])
    assert told == BestEffort(n_running=6, n_waiting=5)


def test_without_the_policy_they_say_nothing():
    assert BestEffort.of([]) is None
    assert BestEffort.of([{"requests_running": 4.0}]) is None


def test_best_effort_kv_is_not_used():
    pool = {"kv_tokens_total": 1000.0, "kv_tokens_used": 900.0}
    assert used_share(pool) == 0.9
    assert used_share(pool | {"policy_be_kv_tokens": 600.0}) == 0.3
    assert used_share(pool | {"policy_be_kv_tokens": 950.0}) == 0.0
    assert used_share({"streams": 3.0}) is None
