"""Values that the engine of a stage reports, twice a second, later on a busy machine."""

import asyncio
from collections.abc import Callable

from test.engine.conftest import Stages


async def load_of(stages: Stages, stage: str) -> dict[str, float]:
    return (await stages.replica(stage).client.ping(5.0)).load


async def total(stages: Stages, stage: str, name: str) -> float:
    """A value that does not change now."""
    await asyncio.sleep(0.7)
    return (await load_of(stages, stage))[name]


async def until(
    stages: Stages, stage: str, name: str, wanted: Callable[[float], bool], within_s: float = 60
) -> float:
    """Wait until the value is wanted; return it."""
    value = None
    try:
        async with asyncio.timeout(within_s):
            while True:
                if stages.replica(stage).is_up:
                    value = (await load_of(stages, stage)).get(name)
                    if value is not None and wanted(value):
                        return value
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"{name} is {value}") from None


async def until_idle(stages: Stages, stage: str) -> None:
    """Wait until the engine has no requests, and no KV outside sessions and the tree."""
    for name in ("requests_running", "kv_tokens_used"):
        await until(stages, stage, name, lambda value: value == 0)
