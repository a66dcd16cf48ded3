"""Eviction by what a server knows, against references that know more."""

import numpy as np
import pytest

from benchmark.kv.gateway import Distributions, GatewayNextUse, Informed
from benchmark.kv.judges import BUFFERED_S, Belady, IdleFacts, Lru, replay
from benchmark.kv.workload import Spec, gaps_of, load_chains, load_utterances, plan

SPEC = Spec(sessions=24, seed=5, conversations=2)
CHAINS, UTTERANCES_S, GAPS = load_chains(), load_utterances(), gaps_of("voice")
WORLD = Distributions.of(CHAINS, UTTERANCES_S, GAPS, SPEC)


def misses(policy, schedule) -> int:
    return replay(schedule, schedule.pool_tokens(0.5, 16), policy).misses


def test_the_servers_estimate_is_near_the_best_that_knows_as_much():
    schedule = plan(CHAINS, UTTERANCES_S, GAPS, SPEC)
    own, informed = misses(GatewayNextUse(), schedule), misses(Informed(WORLD), schedule)
    assert own <= 1.1 * informed
    assert misses(Belady(schedule), schedule) <= min(own, informed)
    assert max(own, informed) < 0.7 * misses(Lru(), schedule)


def policies():
    return GatewayNextUse(), Informed(WORLD)


@pytest.mark.parametrize("policy", policies(), ids=["gateway", "informed"])
def test_more_text_is_expected_to_play_for_longer(policy):
    for session, n_tokens in ((0, 20), (1, 400)):
        policy.accessed(session, 0.0)
        policy.idle(session, 1.0, IdleFacts(99.0, 0.0, n_tokens))
    assert policy.victim([0, 1], 1.0) == 1


@pytest.mark.parametrize("policy", policies(), ids=["gateway", "informed"])
def test_the_end_of_speech_replaces_the_estimate_and_speech_protects(policy):
    for session, n_tokens in ((0, 400), (1, 200)):
        policy.accessed(session, 0.0)
        policy.idle(session, 1.0, IdleFacts(99.0, 0.0, n_tokens))
    # The talker has spoken 400 tokens in 32 s; the others take 59 s.
    policy.spoken(0, 32.0 - BUFFERED_S, 32.0)
    assert policy.victim([0, 1], 30.0) == 1
    policy.speaks(1, 30.0)
    assert policy.victim([0, 1], 30.0) == 0


def test_what_is_left_of_a_duration_depends_on_how_long_it_has_lasted():
    informed = Informed(WORLD)
    left_s = informed._remaining(np.array([1.0, 2.0, 10.0]), 5.0)
    assert set(left_s) == {5.0}
    assert set(informed._remaining(np.array([1.0]), 3.0)) == {3.0}, "beyond all: as long again"
