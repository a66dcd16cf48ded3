import json
import math
from itertools import pairwise

import numpy as np
import pytest

from benchmark.kv.workload import (
    CHAT_BETWEEN,
    CHAT_MEDIAN_S,
    CHAT_SIGMA,
    WORKLOADS,
    Spec,
    Turn,
    gaps_of,
    load_chains,
    load_utterances,
    plan,
)
from benchmark.workloads.make_mooncake_chains import chains as linked
from benchmark.workloads.make_mooncake_chains import keep

CHAINS = (tuple(Turn(800, 80) for _ in range(4)), (Turn(1600, 3), Turn(8, 2), Turn(5, 400)))
UTTERANCES_S = np.array([0.5, 2.0, 4.0])
SPEC = Spec(sessions=6, conversations=2)


def drawn(spec=SPEC, regime="voice"):
    return plan(list(CHAINS), UTTERANCES_S, gaps_of(regime), spec)


def by_session(schedule):
    sessions = {}
    for access in schedule.accesses:
        sessions.setdefault(access.session, []).append(access)
    return sessions


def test_the_same_seed_draws_the_same_schedule():
    assert drawn() == drawn()
    assert drawn() != drawn(Spec(sessions=6, conversations=2, seed=2))


def test_more_sessions_do_not_change_the_others():
    more = by_session(drawn(Spec(sessions=9, conversations=2)))
    assert by_session(drawn()).items() <= more.items()


@pytest.mark.parametrize("regime", ["voice", "chat"])
def test_the_next_utterance_starts_a_gap_after_the_end_of_playback(regime):
    sessions = by_session(drawn(regime=regime))
    assert sorted(sessions) == list(range(12))
    for number, accesses in sessions.items():
        assert [access.turn for access in accesses] == list(range(len(accesses)))
        assert [access.last for access in accesses] == [False] * (len(accesses) - 1) + [True]
        # Even numbers are a user's first conversation, which the odd one follows.
        following = accesses if number % 2 else [*accesses, sessions[number + 1][0]]
        for access, after in pairwise(following):
            assert after.speech_s == access.playback_end_s + access.next_gap_s
        for access in accesses:
            assert access.request_s - access.speech_s == pytest.approx(0.5) or (
                access.request_s - access.speech_s >= 2.0 - 1e-9
            )


def test_a_response_plays_eighty_ms_per_frame():
    few, many = (drawn(Spec(frames_per_token=n, pace_sigma=0.0)) for n in (2.0, 4.0))
    for a in few.accesses:
        assert a.playback_s == pytest.approx(a.output_tokens * 2 * 0.08)
    assert max(a.playback_s for a in many.accesses) == pytest.approx(400 / 8 * 4 * 0.08)


def test_paces_vary_between_conversations_and_within_them():
    paces = {
        number: [a.playback_s / a.output_tokens / 0.08 for a in accesses if a.output_tokens > 5]
        for number, accesses in by_session(drawn(Spec(sessions=40))).items()
    }
    within = [np.std(np.log(own)) for own in paces.values() if len(own) > 1]
    between = np.std([np.mean(np.log(own)) for own in paces.values() if own])
    assert 0.05 < np.mean(within) < 0.12
    assert 0.08 < between < 0.17


def test_a_response_does_not_end_before_it_is_generated():
    slow = drawn(Spec(frames_per_token=1.0, pace_sigma=0.0, token_s=0.1))
    assert all(a.playback_end_s == a.generated_s > a.request_s for a in slow.accesses)


def test_a_session_holds_the_tokens_of_its_turns():
    for accesses in by_session(drawn()).values():
        assert accesses[0].history_tokens == 0
        for access, after in pairwise(accesses):
            assert after.history_tokens == access.kv_tokens
    assert {a.input_tokens for a in drawn().accesses} == {100, 200, 1}, "a turn is never empty"


def test_the_working_set_is_the_highest_kv_of_open_sessions():
    schedule = drawn()
    sessions = by_session(schedule).values()

    def open_tokens(now_s: float) -> int:
        return sum(
            max((a.kv_tokens for a in accesses if a.request_s <= now_s), default=0)
            for accesses in sessions
            if accesses[-1].playback_end_s > now_s
        )

    most = max(open_tokens(access.request_s) for access in schedule.accesses)
    assert schedule.working_set_tokens() == most
    assert schedule.working_set_tokens(16) >= most
    assert schedule.pool_tokens(1.0, 16) == schedule.working_set_tokens(16)
    assert schedule.pool_tokens(0.25, 16) % 16 == 0
    assert schedule.pool_tokens(0.5) == most // 2


def test_voice_gaps_are_short_and_chat_gaps_are_the_trace_s():
    rng = np.random.default_rng(1)
    voice, chat = gaps_of("voice"), gaps_of("chat", 0.1)
    assert np.median([voice.draw(rng, 0.0) for _ in range(500)]) < 1.0
    paces = rng.standard_normal(4000)
    logs = np.log([[chat.draw(rng, pace) for _ in range(2)] for pace in paces])
    assert math.exp(logs.mean()) == pytest.approx(0.1 * CHAT_MEDIAN_S, rel=0.05)
    assert logs.std() == pytest.approx(CHAT_SIGMA, rel=0.05)
    assert np.corrcoef(logs.T)[0, 1] == pytest.approx(CHAT_BETWEEN, abs=0.05)
    with pytest.raises(ValueError, match="voice and chat"):
        gaps_of("letters")


def test_the_pauses_in_the_chains_have_the_spread_of_the_chat_regime():
    stored = json.loads((WORKLOADS / "mooncake_chains.json").read_text())["chains"]
    spacings_s = [b[0] - a[0] for chain in stored for a, b in pairwise(chain)]
    assert np.log(spacings_s).std() == pytest.approx(CHAT_SIGMA, abs=0.02)
    assert np.median(spacings_s) == pytest.approx(CHAT_MEDIAN_S, rel=0.06)


def test_the_chains_are_whole_and_within_their_limits():
    stored = json.loads((WORKLOADS / "mooncake_chains.json").read_text())["chains"]
    assert len(load_chains()) == len(stored) > 400
    for chain in stored:
        held = 0
        for _, n_input, n_output, new_tokens in chain:
            assert n_input == held + new_tokens
            held = n_input + n_output
        assert keep(chain)


def test_chains_are_linked_by_whole_blocks_and_branches_left_out():
    def row(second: int, n_input: int, blocks: list[int]) -> dict:
        at_ms = 1000 * second - (second > 0)
        return {
            "timestamp": at_ms,
            "input_length": n_input,
            "output_length": 10,
            "hash_ids": blocks,
        }

    rows = [
        row(0, 1100, [1, 2, 3]),
        row(3, 1000, [7, 8]),  # one full block: too little to be recognised by
        row(6, 1200, [1, 2, 4]),
        row(9, 1200, [7, 8, 9]),
        row(12, 1700, [1, 2, 4, 5]),
        row(15, 1100, [20, 21, 22]),
        row(18, 1300, [20, 21, 23]),
        row(18, 1400, [20, 21, 24]),
    ]
    assert linked(rows) == [
        [(0, 1100, 10, 1100), (6, 1200, 10, 90), (12, 1700, 10, 490)],
        [(3, 1000, 10, 1000)],
        [(9, 1200, 10, 1200)],
        [(15, 1100, 10, 1100), (18, 1300, 10, 190), (18, 1400, 10, 90)],
    ]


def test_invalid_parameters_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        Spec(sessions=0)
    with pytest.raises(ValueError, match="positive"):
        Spec(divisor=0)


def test_utterances_are_durations():
    assert load_utterances().min() > 0
    assert 1.0 < np.median(load_utterances()) < 3.0
