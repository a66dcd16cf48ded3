"""Scoring beside the event loop: each call gets its own scores and errors, the loop goes on."""

import asyncio
import threading

import numpy as np
import pytest

from sglang_live.interaction.scoring import SpeechScorer
from sglang_live.interaction.silero import SpeechState

PATIENCE_S = 5


class FakeNetwork:
    """Scores are the number of windows of each user; the state counts the calls."""

    def __init__(self):
        self.may_score = threading.Event()
        self.may_score.set()
        self.threads: set[int] = set()
        self.shown: list[int] = []
        self.together: list[int] = []

    def initial_state(self) -> SpeechState:
        return SpeechState(np.zeros(1), np.zeros(1))

    def score(self, asked):
        assert self.may_score.wait(PATIENCE_S)
        self.threads.add(threading.get_ident())
        lengths = [len(windows) for windows, _ in asked]
        if 0 in lengths:
            raise ValueError("nothing to score")
        self.shown += lengths
        self.together.append(sum(lengths))
        states = [SpeechState(state.h + 1, state.c) for _, state in asked]
        return [(np.full(n, n), state) for n, state in zip(lengths, states, strict=True)]


@pytest.fixture
def network():
    return FakeNetwork()


@pytest.fixture
def scorer(network):
    scorer = SpeechScorer(network)
    yield scorer
    network.may_score.set()
    scorer.close()


def windows(n: int) -> np.ndarray:
    return np.zeros((n, 576), np.float32)


async def score(scorer: SpeechScorer, n: int, state: SpeechState):
    async with asyncio.timeout(PATIENCE_S):
        return await scorer.score(windows(n), state)


async def test_each_call_gets_its_own_scores_in_order(scorer, network):
    state = network.initial_state()
    scores = await asyncio.gather(*(score(scorer, n, state) for n in range(1, 33)))
    assert [int(probabilities[0]) for probabilities, _ in scores] == list(range(1, 33))
    assert network.shown == list(range(1, 33))
    assert len(network.threads) == 1
    assert threading.get_ident() not in network.threads


async def test_a_users_state_goes_on_from_call_to_call(scorer, network):
    states = {"a": network.initial_state(), "b": network.initial_state()}

    async def ask(name: str, times: int) -> None:
        for _ in range(times):
            _, states[name] = await score(scorer, 1, states[name])

    await asyncio.gather(ask("a", 7), ask("b", 20))
    assert (states["a"].h.item(), states["b"].h.item()) == (7, 20)


async def test_the_loop_goes_on_while_the_network_computes(scorer, network):
    network.may_score.clear()
    asking = asyncio.create_task(score(scorer, 3, network.initial_state()))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not asking.done()
    network.may_score.set()
    probabilities, _ = await asking
    assert list(probabilities) == [3, 3, 3]


async def test_waiting_windows_are_scored_together_up_to_the_bound(scorer, network):
    network.may_score.clear()
    state = network.initial_state()
    asking = [asyncio.create_task(score(scorer, n, state)) for n in (1, *([8] * 12), 64, 1)]
    await asyncio.sleep(0)
    network.may_score.set()
    await asyncio.gather(*asking)
    assert sum(network.together) == 1 + 12 * 8 + 64 + 1
    assert max(network.together) < 2 * 64
    assert len(network.together) <= 5


async def test_an_error_is_raised_by_the_call_that_caused_it_only(scorer, network):
    state = network.initial_state()
    network.may_score.clear()
    asking = [asyncio.create_task(score(scorer, n, state)) for n in (1, 3, 0, 2)]
    await asyncio.sleep(0)
    network.may_score.set()
    _, *fine, failed, last = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(failed, ValueError)
    assert [list(scored[0]) for scored in (*fine, last)] == [[3, 3, 3], [2, 2]]


async def test_a_cancelled_call_is_not_scored(scorer, network):
    network.may_score.clear()
    state = network.initial_state()
    first = asyncio.create_task(score(scorer, 1, state))
    leaving = asyncio.create_task(score(scorer, 5, state))
    last = asyncio.create_task(score(scorer, 2, state))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    network.may_score.set()
    await asyncio.gather(first, last)
    assert network.shown == [1, 2]


async def test_a_call_after_close_raises(scorer, network):
    state = network.initial_state()
    await score(scorer, 1, state)
    scorer.close()
    scorer._thread.join(PATIENCE_S)
    with pytest.raises(RuntimeError):
        await score(scorer, 1, state)
