import random
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark.kv.judge import POLICIES, Options, main, parse_options, run
from benchmark.kv.judges import Belady, IdleFacts, Link, Lru, NextUseHint, Policy, replay
from benchmark.kv.workload import Access, Schedule

FOREVER_S = 1e6
SLOW = Link(tokens_per_s=10.0, latency_s=0.5)


def access(session, request_s, *, history=0, new=0, out=0, turn=1, **changes) -> Access:
    """An access whose request runs for a tenth of a second and whose session stays open."""
    fields = {
        "session": session,
        "turn": turn,
        "speech_s": request_s,
        "request_s": request_s,
        "generated_s": request_s + 0.1,
        "playback_end_s": FOREVER_S,
        "next_gap_s": 0.0,
        "history_tokens": history,
        "input_tokens": new,
        "output_tokens": out,
        "last": False,
    }
    return Access(**{**fields, **changes})


def opening(session, request_s, tokens, **changes) -> Access:
    return access(session, request_s, new=tokens, turn=0, **changes)


def reference_string(sessions: list[int]) -> Schedule:
    """A page per session and a reference per second, as in textbooks."""
    seen = set()
    accesses = []
    for second, session in enumerate(sessions):
        is_first = session not in seen
        seen.add(session)
        made = opening(session, second, 1) if is_first else access(session, second, history=1)
        accesses.append(made)
    return Schedule(tuple(accesses))


def test_textbook_string_gives_textbook_faults():
    # Silberschatz, Galvin, Gagne: 12 faults of LRU and 9 of OPT in 3 frames; 6 are first uses.
    schedule = reference_string([7, 0, 1, 2, 0, 3, 0, 4, 2, 3, 0, 3, 2, 1, 2, 0, 1, 7, 0, 1])
    assert replay(schedule, 3, Lru(), page_tokens=1).misses == 12 - 6
    assert replay(schedule, 3, Belady(schedule), page_tokens=1).misses == 9 - 6


def test_lru_misses_every_round_of_a_circle_that_is_one_too_large():
    schedule = reference_string([0, 1, 2, 3] * 5)
    assert replay(schedule, 3, Lru(), page_tokens=1).misses == 16
    # Two of three are kept from round to round: of 16 reuses every third misses.
    assert replay(schedule, 3, Belady(schedule), page_tokens=1).misses == 5


def test_only_the_needed_part_of_the_tail_is_evicted_and_reloaded():
    schedule = Schedule(
        (opening(0, 0.0, 40), opening(1, 1.0, 20), access(0, 30.0, history=40, new=2))
    )
    outcome = replay(schedule, 64, Lru(), page_tokens=8)
    # 5 + 3 pages are all there are, and the third access needs a sixth page.
    assert outcome.misses == 0
    outcome = replay(schedule, 48, Lru(), page_tokens=8)
    assert (outcome.reloaded_pages, outcome.reloaded_tokens) == (2, 16)
    assert outcome.cycles == 0, "29 s are no short interval"


def test_a_reload_soon_after_the_eviction_is_a_cycle():
    for seconds, cycles in ((9.0, 1), (12.0, 0)):
        schedule = Schedule(
            (opening(0, 0.0, 8), opening(1, 1.0, 8), access(0, 1.0 + seconds, history=8))
        )
        assert replay(schedule, 8, Lru(), page_tokens=8).cycles == cycles


def test_a_running_session_is_not_evicted():
    runs_long = opening(0, 0.0, 8, generated_s=20.0)
    schedule = Schedule((runs_long, opening(1, 1.0, 4), opening(2, 2.0, 4)))
    outcome = replay(schedule, 12, Lru(), page_tokens=4)
    assert (outcome.evicted_tokens, outcome.overdrawn) == (4, 0)
    too_small = replay(schedule, 8, Lru(), page_tokens=4)
    assert too_small.overdrawn == 2
    assert too_small.evicted_tokens == 8, "the pool is whole again once others are idle"


def test_a_closed_session_takes_no_room():
    gone = opening(0, 0.0, 8, last=True, playback_end_s=1.0)
    outcome = replay(Schedule((gone, opening(1, 1.0, 8))), 8, Lru(), page_tokens=8)
    assert outcome.evicted_tokens == 0


def spoken(speech_s: float) -> Schedule:
    """Session 0 loses its 20 tokens to session 1, which ends; its user speaks until 30."""
    return Schedule(
        (
            opening(0, 0.0, 20),
            opening(1, 1.0, 20, last=True, playback_end_s=10.0),
            access(0, 30.0, history=20, speech_s=30.0 - speech_s),
        )
    )


@pytest.mark.parametrize(
    ("speech_s", "hidden_tokens", "path_s"),
    [(3.0, 20, 0.0), (2.5, 20, 0.0), (1.5, 10, 1.0), (0.2, 0, 2.3)],
)
def test_preload_hides_the_tokens_that_are_loaded_while_the_user_speaks(
    speech_s, hidden_tokens, path_s
):
    def tried(preload):
        return replay(spoken(speech_s), 20, Lru(), page_tokens=4, link=SLOW, preload=preload)

    early, demand = tried(True), tried(False)
    assert early.reloaded_tokens == demand.reloaded_tokens == 20
    assert early.misses == demand.misses == 1
    assert (early.hidden_tokens, demand.hidden_tokens) == (hidden_tokens, 0)
    assert early.path_s == pytest.approx(path_s)
    assert demand.path_s == pytest.approx(2.5)


def test_preload_takes_no_room_from_another_speaking_user():
    both_speak = Schedule(
        (
            opening(0, 0.0, 8),
            opening(1, 1.0, 8),
            access(1, 20.0, history=8, speech_s=10.0),
            access(0, 21.0, history=8, speech_s=11.0),
        )
    )
    outcome = replay(both_speak, 8, Belady(both_speak), page_tokens=8, preload=True)
    assert outcome.hidden_tokens == 0
    assert outcome.misses == 1, "session 1 kept what it had"


def idle_policy(*, playback_ends_s, now_s=0.0):
    policy = NextUseHint(prior_gap_s=2.0)
    for session, end_s in enumerate(playback_ends_s):
        policy.accessed(session, now_s)
        policy.idle(session, now_s, IdleFacts(end_s))
    return policy


def test_next_use_spares_the_session_whose_response_ends_soon():
    policy = idle_policy(playback_ends_s=[30.0, 5.0, 20.0])
    assert policy.victim([0, 1, 2], 1.0) == 0
    assert policy.victim([1, 2], 1.0) == 2


def test_next_use_evicts_the_session_that_is_long_overdue():
    policy = idle_policy(playback_ends_s=[5.0, 60.0])
    assert policy.victim([0, 1], 10.0) == 1
    assert policy.victim([0, 1], 50.0) == 0


def test_next_use_spares_speakers_as_long_as_there_are_others():
    policy = idle_policy(playback_ends_s=[30.0, 5.0])
    policy.speaks(0, 1.0)
    assert policy.victim([0, 1], 1.0) == 1
    assert policy.victim([0], 1.0) == 0
    policy.accessed(0, 2.0)
    policy.idle(0, 3.0, IdleFacts(30.0))
    assert policy.victim([0, 1], 3.0) == 0


def test_next_use_uses_the_average_gap_of_each_user():
    policy = idle_policy(playback_ends_s=[10.0, 10.0])
    policy.accessed(0, 100.0)
    policy.accessed(1, 11.0)
    for session in (0, 1):
        policy.idle(session, 100.0, IdleFacts(110.0))
    assert policy.victim([0, 1], 100.0) == 0


def test_without_playback_facts_next_use_ranks_by_age():
    policy = NextUseHint(prior_gap_s=2.0)
    for session in range(3):
        policy.idle(session, float(session), IdleFacts(None))
    assert policy.victim([1, 0, 2], 5.0) == 0


class ArbitraryPolicy(Policy):
    """A policy of arbitrary choices."""

    def __init__(self, seed):
        self._rng = random.Random(seed)

    def speaks(self, session, now_s):
        pass

    accessed = speaks

    def idle(self, session, now_s, facts):
        pass

    def victim(self, candidates, now_s):
        return self._rng.choice(candidates)


def times(most):
    # Whole seconds, so that things happen at the same time.
    return st.integers(0, most).map(float)


@st.composite
def schedules(draw, max_sessions=4, max_turns=4, max_tokens=5) -> Schedule:
    accesses = []
    for session in range(draw(st.integers(1, max_sessions))):
        history, now_s = 0, draw(times(4))
        n_turns = draw(st.integers(1, max_turns))
        for turn in range(n_turns):
            request_s = now_s + draw(times(3))
            generated_s = request_s + 1.0 + draw(times(1))
            one = access(
                session,
                request_s,
                history=history,
                new=draw(st.integers(turn == 0, max_tokens)),
                out=draw(st.integers(0, 1)),
                turn=turn,
                speech_s=now_s,
                generated_s=generated_s,
                playback_end_s=generated_s + draw(times(6)),
                next_gap_s=draw(times(3)),
                last=turn == n_turns - 1,
            )
            accesses.append(one)
            history, now_s = one.kv_tokens, one.playback_end_s + one.next_gap_s
    return Schedule(tuple(sorted(accesses, key=lambda a: (a.request_s, a.session))))


@given(schedules(), st.integers(1, 20), st.integers(1, 3), st.integers(), st.booleans())
@settings(max_examples=150)
def test_belady_reloads_no_more_pages_than_anyone(schedule, n_pages, page_tokens, seed, preload):
    def pages_of(policy, preload):
        outcome = replay(
            schedule, n_pages * page_tokens, policy, page_tokens=page_tokens, preload=preload
        )
        return outcome.reloaded_pages

    fewest = pages_of(Belady(schedule), False)
    others = (Lru(), NextUseHint(2.0), ArbitraryPolicy(seed), Belady(schedule, knows_end=False))
    assert all(fewest <= pages_of(policy, preload) for policy in others)
    assert fewest <= pages_of(Belady(schedule), preload)


def fewest_reloads(schedule: Schedule, n_pages: int) -> int:
    """The optimum by exhaustive search, in pages of one token."""
    moments = []
    for number, a in enumerate(schedule.accesses):
        moments += [(a.request_s, 2, a.session, number), (a.generated_s, 0, a.session, number)]
        if a.last:
            moments.append((a.playback_end_s, 1, a.session, number))
    n_sessions = 1 + max(a.session for a in schedule.accesses)
    held, pinned = [0] * n_sessions, [False] * n_sessions
    costs = {tuple(held): 0}
    for _, kind, session, number in sorted(moments):
        after: dict[tuple[int, ...], int] = {}
        for state, cost in costs.items():
            now = list(state)
            if kind == 2:
                cost += held[session] - now[session]
                now[session] = schedule.accesses[number].kv_tokens
            elif kind == 1:
                now[session] = 0
            pins = [pinned[s] or (kind == 2 and s == session) for s in range(n_sessions)]
            if kind == 0:
                pins[session] = False
            for made in room(now, pins, n_pages):
                after[made] = min(cost, after.get(made, cost))
        pinned[session] = kind == 2
        held[session] = schedule.accesses[number].kv_tokens if kind != 1 else 0
        costs = after
    return min(costs.values())


def room(state: list[int], pins: list[bool], n_pages: int):
    """All states with as much KV as possible; evicting more than needed never helps."""
    idle = sum(n for n, pin in zip(state, pins, strict=True) if not pin)
    target = max(min(sum(state), n_pages), sum(state) - idle)
    choices = [[n] if pin else range(n + 1) for n, pin in zip(state, pins, strict=True)]
    return (made for made in product(*choices) if sum(made) == target)


@given(schedules(max_sessions=3, max_turns=3, max_tokens=2), st.integers(1, 10))
@settings(max_examples=100)
def test_belady_equals_exhaustive_search(schedule, n_pages):
    outcome = replay(schedule, n_pages, Belady(schedule), page_tokens=1)
    assert outcome.reloaded_tokens == outcome.reloaded_pages == fewest_reloads(schedule, n_pages)


@given(schedules(), st.integers(1, 12), st.integers(1, 3), st.integers(), st.booleans())
@settings(max_examples=100)
def test_evicted_pages_are_reloaded_or_never_needed(schedule, n_pages, page, seed, preload):
    for policy in (Lru(), NextUseHint(2.0), Belady(schedule), ArbitraryPolicy(seed)):
        o = replay(schedule, n_pages * page, policy, page_tokens=page, link=SLOW, preload=preload)
        assert o.evicted_tokens == o.reloaded_tokens + o.lost_tokens
        assert 0 <= o.hidden_tokens <= o.reloaded_tokens
        assert o.misses <= o.reuses == sum(a.turn > 0 for a in schedule.accesses)
        assert (o.misses == 0) == (o.reloaded_tokens == 0)
        assert preload or o.hidden_tokens == 0


@given(schedules(), st.integers(1, 4), st.booleans())
@settings(max_examples=50)
def test_a_pool_of_the_working_set_loses_nothing(schedule, page_tokens, preload):
    pool_tokens = schedule.pool_tokens(1.0, page_tokens)
    outcome = replay(schedule, pool_tokens, Lru(), page_tokens=page_tokens, preload=preload)
    assert (outcome.evicted_tokens, outcome.overdrawn) == (0, 0)


def test_a_pool_is_whole_pages():
    with pytest.raises(ValueError, match="whole pages"):
        replay(reference_string([0]), 10, Lru(), page_tokens=16)


def test_next_use_reloads_less_than_lru_and_belady_less_than_both_in_conversations():
    options = Options(sessions=(32,), conversations=2, seeds=(1,), pool_share=(0.5,))
    reloaded = {row.policy: row.demand.reloaded_tokens for row in run(options)}
    assert list(reloaded) == list(POLICIES)
    assert reloaded["Belady"] < reloaded["next-use"] < 0.7 * reloaded["LRU"]
    assert list(run(options)) == list(run(options))
    assert list(run(options)) != list(run(replace(options, regime="chat")))


def test_the_command_prints_a_line_per_policy(monkeypatch, capsys, tmp_path):
    document = tmp_path / "judge.json"
    argv = ["judge", "--sessions", "4,8", "--conversations", "1", "--seeds", "1"]
    monkeypatch.setattr("sys.argv", [*argv, "--json", str(document)])
    main()
    printed = capsys.readouterr().out
    assert printed.count("next-use") == 4
    assert '"benchmark": "kv_judge"' in document.read_text()


@pytest.mark.parametrize(
    "argv", ["--regime letters", "--pool-share 2", "--sessions 0", "--page-tokens 0"]
)
def test_invalid_flags_are_refused(argv, capsys):
    with pytest.raises(SystemExit):
        parse_options(argv.split())
    assert "error" in capsys.readouterr().err
