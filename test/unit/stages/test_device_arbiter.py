"""Turns on a device, over real sockets."""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from sglang_live.engine_channel.device_turn import DeviceTurn
from sglang_live.errors import BadInputError
from sglang_live.stage_specs import with_arbiters
from sglang_live.stages.device_arbiter import DeviceArbiter
from sglang_live.stages.spec import StageSpec

pytestmark = pytest.mark.asyncio


def spec_of(folder: Path) -> StageSpec:
    return StageSpec(
        stage="arbiter",
        replica=0,
        model_path="",
        family="",
        cache_dir="",
        address="",
        same_host=True,
        run_dir=str(folder),
        served_name="",
        turns=str(folder / "turns"),
    )


@contextlib.asynccontextmanager
async def arbitrating(folder: Path) -> AsyncIterator[DeviceArbiter]:
    arbiter = DeviceArbiter(spec_of(folder))
    await arbiter.start()
    try:
        yield arbiter
    finally:
        # As when its process ends.
        asyncio.get_running_loop().remove_reader(arbiter._listener)
        arbiter._listener.close()
        for connection in list(arbiter._numbers):
            arbiter._drop(connection)


async def granted(*turns: DeviceTurn) -> list[bool]:
    """Who has the device when all messages have been read."""
    for _ in range(20):
        await asyncio.sleep(0.001)
    return [turn.poll() for turn in turns]


async def test_the_device_goes_to_the_earliest_deadline_when_it_is_free(tmp_path):
    async with arbitrating(tmp_path) as arbiter:
        one, two, three = (DeviceTurn(tmp_path / "turns") for _ in range(3))
        one.ask(5.0)
        assert await granted(one, two) == [True, False]
        two.ask(9.0)
        three.ask(7.0)
        assert await granted(one, two, three) == [True, False, False]
        two.ask(6.0)  # something has come
        one.release()
        assert await granted(one, two, three) == [False, True, False]
        two.release()
        assert await granted(one, two, three) == [False, False, True]
        load = arbiter.load()
        assert (load["connections"], load["granted"]) == (3.0, 3.0)


async def test_asking_later_keeps_the_place(tmp_path):
    async with arbitrating(tmp_path):
        holder, one, two = (DeviceTurn(tmp_path / "turns") for _ in range(3))
        holder.ask(0.0)
        assert await granted(holder) == [True]
        one.ask(1.0)
        two.ask(2.0)
        one.ask(3.0)
        holder.release()
        assert await granted(one, two) == [True, False]


async def test_the_next_turn_may_begin_before_the_work_ends(tmp_path):
    async with arbitrating(tmp_path):
        one, two = (DeviceTurn(tmp_path / "turns") for _ in range(2))
        one.ask(1.0)
        assert await granted(one) == [True]
        one.ends_at(time.monotonic() + 0.2)
        two.ask(2.0)
        assert await granted(two) == [False]
        async with asyncio.timeout(10):
            while not two.poll():
                await asyncio.sleep(0.01)
        # The work of the first ends, and it wants another turn.
        one.release()
        one.ask(0.5)
        assert await granted(one) == [False]
        two.release()
        assert await granted(one) == [True]


async def test_work_that_ends_sooner_than_expected_ends_the_turn_once(tmp_path):
    async with arbitrating(tmp_path):
        one, two = (DeviceTurn(tmp_path / "turns") for _ in range(2))
        one.ask(1.0)
        assert await granted(one) == [True]
        one.ends_at(time.monotonic() + 0.15)
        one.release()
        one.ask(1.0)
        assert await granted(one) == [True]
        two.ask(2.0)
        await asyncio.sleep(0.25)  # beyond the time of the first turn
        assert await granted(two) == [False]


async def test_who_dies_with_a_turn_that_was_about_to_end_ends_it(tmp_path):
    async with arbitrating(tmp_path):
        one, two = (DeviceTurn(tmp_path / "turns") for _ in range(2))
        one.ask(1.0)
        assert await granted(one) == [True]
        one.ends_at(time.monotonic() + 0.1)
        one.socket.close()
        two.ask(2.0)
        assert await granted(two) == [True]
        await asyncio.sleep(0.2)
        one = DeviceTurn(tmp_path / "turns")
        one.ask(0.0)
        assert await granted(one) == [False]


async def test_who_dies_gives_the_device_back(tmp_path):
    async with arbitrating(tmp_path):
        child = os.fork()
        if not child:
            turn = DeviceTurn(tmp_path / "turns")
            turn.ask(0.0)
            while True:  # until it is killed, with the device
                turn.poll()
        other = DeviceTurn(tmp_path / "turns")
        await asyncio.sleep(0.2)
        other.ask(1.0)
        assert await granted(other) == [False]
        os.kill(child, 9)
        os.waitpid(child, 0)
        async with asyncio.timeout(10):
            while not other.poll():
                await asyncio.sleep(0.01)


async def test_a_grant_that_crosses_the_withdrawal_of_its_wish_is_not_taken(tmp_path):
    async with arbitrating(tmp_path):
        one, two = (DeviceTurn(tmp_path / "turns") for _ in range(2))
        one.ask(1.0)
        await asyncio.sleep(0.05)  # the grant has come, and was not read
        one.release()
        two.ask(1.0)
        assert await granted(two) == [True]
        one.ask(0.0)
        assert await granted(one) == [False]
        two.release()
        assert await granted(one) == [True]


async def test_without_an_arbiter_work_goes_on_and_is_counted(tmp_path):
    turn = DeviceTurn(tmp_path / "turns")
    turn.ask(1.0)
    assert turn.poll()
    turn.release()
    assert turn.counts["device_turns_missed"] == 1
    async with arbitrating(tmp_path):
        async with asyncio.timeout(10):
            while turn.socket is None:  # it connects again
                turn.ask(1.0)
                assert turn.poll()
                turn.release()
                await asyncio.sleep(0.05)
        turn.ask(1.0)
        assert await granted(turn) == [True]
        assert turn.counts["device_turns"] == 1
    turn.release()
    turn.ask(1.0)
    assert turn.poll(), "the arbiter has gone"


async def test_one_has_the_device_at_a_time_and_all_have_it_in_the_end(tmp_path):
    n_turns, at_once = [0] * 5, 0

    async def compute(n: int, chance: random.Random) -> None:
        nonlocal at_once
        turn = DeviceTurn(tmp_path / "turns")
        while n_turns[n] < 40:
            turn.ask(chance.choice((0.0, 1.0, 2.0)))
            if chance.random() < 0.1:
                turn.release()  # its work was cancelled
                continue
            while not turn.poll():
                await asyncio.sleep(0)
            at_once += 1
            assert at_once == 1
            await asyncio.sleep(0)
            at_once -= 1
            n_turns[n] += 1
            turn.release()

    async with arbitrating(tmp_path), asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        for n in range(5):
            tasks.create_task(compute(n, random.Random(n)))
    assert n_turns == [40] * 5


async def test_each_shared_device_has_an_arbiter_and_its_engines_no_overlap(tmp_path):
    def stage(name: str, device: str, *, shares: bool = True, **args: int) -> StageSpec:
        return replace(
            spec_of(tmp_path),
            stage=name,
            turns="",
            device=device,
            shares_device=shares,
            engine_args=args,
        )

    alone = stage("thinker", "cuda:2", shares=False)
    shared = [stage(name, "cuda:0") for name in ("thinker", "talker", "vocoder")]
    arbiter, *found = with_arbiters([alone, *shared])
    assert (arbiter.stage, arbiter.factory.rpartition(":")[2]) == ("arbiter", "DeviceArbiter")
    assert found[0] == alone
    assert {one.turns for one in found[1:]} == {arbiter.turns} != {""}
    overlaps = [not one.engine_args.get("disable_overlap_schedule") for one in found[1:]]
    assert overlaps == [False, False, True], "a vocoder has no such setting"
    with pytest.raises(BadInputError, match="thinker/0 shares a device and uses several"):
        with_arbiters([stage("thinker", "cuda:0", tp_size=2), shared[1]])
