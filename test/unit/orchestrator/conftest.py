"""An orchestrator over fake stages."""

from collections.abc import AsyncIterator, Callable

import pytest

from sglang_live.policy.policies import Policies

from .fakes import FakeWorld


@pytest.fixture
async def world_of(run_dir) -> AsyncIterator[Callable]:
    worlds: list[FakeWorld] = []

    async def start(
        reply=(5, 6, 7), n_replicas=1, max_sessions=8, policies=(), **of_talker
    ) -> FakeWorld:
        on = Policies.parse(policies)
        worlds.append(FakeWorld(run_dir, list(reply), n_replicas, max_sessions, on, **of_talker))
        await worlds[-1].start()
        return worlds[-1]

    yield start
    for world in worlds:
        await world.stop()


@pytest.fixture
async def world(world_of) -> FakeWorld:
    return await world_of()
