"""Claims about the bound on flex requests."""

import asyncio
from collections import Counter

import pytest

from sglang_live.errors import BadInputError
from sglang_live.gateway.flex.gate import FlexBusyError, FlexConfig, FlexGate


def gate_of(counts: Counter[str] | None = None, **config) -> FlexGate:
    return FlexGate(FlexConfig(**config), lambda outcome: (counts or Counter()).update([outcome]))


async def waiting(gate: FlexGate, n: int) -> list[asyncio.Task[None]]:
    tasks = []
    for _ in range(n):
        tasks.append(asyncio.create_task(gate.enter()))
        await asyncio.sleep(0)
    return tasks


async def test_places_are_given_in_the_order_of_arrival():
    gate = gate_of(at_once=1, waiting=3)
    await gate.enter()
    first, second = await waiting(gate, 2)
    assert (gate.n_running, gate.n_waiting) == (1, 2)
    gate.leave()
    await asyncio.wait_for(first, 30)
    assert not second.done() and gate.n_running == 1
    gate.leave()
    await asyncio.wait_for(second, 30)
    gate.leave()
    assert (gate.n_running, gate.n_waiting) == (0, 0)


async def test_one_too_many_is_refused_with_a_time_to_retry():
    counts = Counter({"served": 0})
    gate = gate_of(counts, at_once=1, waiting=1)
    await gate.enter()
    [task] = await waiting(gate, 1)
    with pytest.raises(FlexBusyError, match="1 flex requests run and 1 wait") as error:
        await gate.enter()
    assert error.value.http_status == 429 and error.value.retry_after_s
    assert counts == {"served": 1, "refused": 1}
    task.cancel()


async def test_the_wait_for_a_place_ends():
    counts = Counter({"served": 0})
    gate = gate_of(counts, at_once=1, wait_s=0.01)
    await gate.enter()
    with pytest.raises(FlexBusyError, match=r"within 0\.01 s"):
        await gate.enter()
    assert gate.n_waiting == 0 and counts["expired"] == 1
    gate.leave()
    await gate.enter()
    assert gate.n_running == 1


async def test_a_client_that_leaves_while_it_waits_takes_no_place():
    gate = gate_of(at_once=1)
    await gate.enter()
    gone, stays = await waiting(gate, 2)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    assert gate.n_waiting == 1
    gate.leave()
    await asyncio.wait_for(stays, 30)
    assert gate.n_running == 1


async def test_a_place_that_comes_with_the_cancellation_goes_to_the_next():
    gate = gate_of(at_once=1)
    await gate.enter()
    gone, stays = await waiting(gate, 2)
    gate.leave()  # `gone` has the place, but has not run yet
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    await asyncio.wait_for(stays, 30)
    gate.leave()
    assert gate.n_running == 0


async def test_a_place_is_free_again_after_a_failure():
    gate = gate_of(at_once=1)
    with pytest.raises(RuntimeError):
        async with gate.place():
            raise RuntimeError
    assert gate.n_running == 0


def test_the_number_of_places_is_positive():
    with pytest.raises(BadInputError, match="flex-at-once"):
        FlexConfig(at_once=0)
