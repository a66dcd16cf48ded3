"""Claims about many rounds in a row: no stream starves, and no policy causes gaps.

Time is simulated.
"""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.decide import RoundPolicy

from .toy_stage import STEP_S, Reply, ToyStage
from .views import BUDGETED, SETS, policy_of

# Streams, and a round's time with all of them as a share of real time; how much of it is fixed.
LOADS = [
    (n, load, fixed) for n in (1, 12, 48) for load in (0.2, 0.5, 0.8, 0.95) for fixed in (0.1, 0.8)
]
any_set = pytest.mark.parametrize("policies", SETS.values(), ids=SETS)


def simulated(policies: RoundPolicy, replies: list[Reply], until_s: float = 200.0, **stage):
    toy = ToyStage(replies=replies, policies=policies, **stage)
    toy.run(until_s)
    return toy


def gaps_s(toy: ToyStage) -> list[float]:
    return [gap_s for reply in toy.replies for gap_s in reply.gaps_s]


@pytest.mark.parametrize("together", [True, False], ids=["together", "one by one"])
@pytest.mark.parametrize("order", ["fcfs", "urgency"])
@pytest.mark.parametrize(("n", "load", "fixed"), LOADS)
def test_pacing_adds_no_gaps_while_capacity_suffices(n, load, fixed, order, together):
    stage = {
        "round_s": load * STEP_S * fixed,
        "per_stream_s": load * STEP_S * (1 - fixed) / n,
        "pipeline_s": 0.25,
        "prefill_s_fixed": 0.002,
    }
    apart_s = 0.0 if together else 0.07

    def replies() -> list[Reply]:
        return [Reply(arrives_s=i * apart_s, steps=80 + 37 * i % 60) for i in range(n)]

    free = simulated(policy_of((order,)), replies(), **stage)
    paced = simulated(policy_of((order, "pacing")), replies(), **stage)
    assert len(gaps_s(paced)) <= len(gaps_s(free))
    assert all(reply.state == "done" for reply in paced.replies)


def test_pacing_keeps_streams_close_to_their_listeners():
    def furthest_s(names) -> float:
        toy = simulated(policy_of(names), [Reply(steps=200) for _ in range(8)], until_s=3.0)
        return max(reply.buffered_s(toy.now_s) for reply in toy.replies)

    assert furthest_s(("fcfs",)) > 10.0
    assert furthest_s(("pacing",)) < 1.6


STORMS = [(2e-4, 1.2, 3000), (1e-4, 1.0, 3000), (1e-4, 0.6, 3000), (3e-4, 1.5, 3000)]


def in_a_storm(
    names, s_per_token: float, apart_s: float, n_tokens: int, *, parks: bool = True
) -> ToyStage:
    """Ten listeners, and long prompts of others one after another.

    parks: decodes can go between the chunks of a prompt.
    """
    listeners = [Reply(steps=150) for _ in range(10)]
    prompts = [
        Reply(arrives_s=2.0 + apart_s * i, prompt_tokens=n_tokens, steps=8) for i in range(8)
    ]
    return simulated(
        policy_of(names, PolicyConfig().changed({"stage.may_pause_prefill": parks})),
        [*listeners, *prompts],
        prefill_s_per_token=s_per_token,
        pipeline_s=0.25,
    )


@pytest.mark.parametrize("order", ["fcfs", "urgency", "deadline"])
@pytest.mark.parametrize("storm", STORMS, ids=str)
def test_long_prompts_of_others_cause_no_gaps_though_buffers_are_short(storm, order):
    toy = in_a_storm((order, "pacing"), *storm)
    assert gaps_s(toy) == []
    # The others wait for little longer than their prompts take.
    s_per_token, _, n_tokens = storm
    for prompt in toy.replies[10:]:
        sound_s = prompt.plays_until_s - prompt.sounded_s - prompt.arrives_s
        assert sound_s < 2.0 * s_per_token * n_tokens + 1.0


def test_a_long_prompt_that_is_computed_in_one_go_causes_gaps():
    assert sum(gaps_s(in_a_storm(("urgency", "pacing"), *STORMS[0], parks=False))) > 0.5
    assert gaps_s(in_a_storm(("urgency", "pacing"), *STORMS[0])) == []


@pytest.mark.parametrize("policies", BUDGETED.values(), ids=BUDGETED)
def test_a_long_prompt_is_passed_for_a_limited_time(policies):
    """Small prompts arrive as fast as memory is freed, and would always take it."""
    small = [Reply(arrives_s=0.05 * i, prompt_tokens=50, steps=50) for i in range(400)]
    big = Reply(arrives_s=0.5, prompt_tokens=700, steps=100)
    toy = simulated(policies, [*small, big], until_s=30.0, capacity_tokens=1000)
    waited_s = big.admitted_s - big.arrives_s
    replies_end_s = 50 * STEP_S + 2 * toy.pipeline_s
    assert waited_s < policies.config.admission.max_bypass_s + replies_end_s + 1.0


@any_set
# Shrinking would simulate for minutes.
@settings(max_examples=10, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    replies=st.lists(
        st.builds(
            Reply,
            arrives_s=st.floats(0, 8),
            prompt_tokens=st.integers(1, 600),
            steps=st.integers(1, 60),
            stands_still=st.booleans(),
        ),
        min_size=1,
        max_size=12,
    ),
    capacity_tokens=st.integers(700, 3000),
)
def test_every_stream_is_admitted_and_every_heard_one_ends(policies, replies, capacity_tokens):
    # Drawn replies are shared between runs of one example: start from untouched ones.
    fresh = [
        Reply(
            arrives_s=r.arrives_s,
            prompt_tokens=r.prompt_tokens,
            steps=r.steps,
            stands_still=r.stands_still,
        )
        for r in replies
    ]
    toy = simulated(policies, fresh, until_s=300.0, capacity_tokens=capacity_tokens)
    assert all(reply.admitted_s is not None for reply in toy.replies)
    assert all(reply.state == "done" for reply in toy.replies if not reply.stands_still)
    assert all(
        reply.longest_hold_s <= policies.config.pacing.max_pause_s + 0.1 for reply in toy.replies
    )


@any_set
def test_a_stream_whose_listener_stands_still_runs_again_within_the_bound(policies):
    still = [Reply(steps=40, stands_still=True) for _ in range(3)]
    toy = simulated(policies, [*still, Reply(steps=300)], until_s=400.0)
    assert all(reply.state == "done" for reply in toy.replies)
    longest_s = max(reply.longest_hold_s for reply in still)
    assert longest_s <= policies.config.pacing.max_pause_s + 0.1
    assert (longest_s > 9.0) == policies.pacing  # otherwise none was paused, and nothing is shown
