"""The baseline of the benchmarks: SGLang alone, whose clients send the whole conversation.

Its turns have the tokens of sessions, and find the KV of earlier turns in the radix tree.
"""

import pytest
import pytest_asyncio

from lab.launch_server import STATELESS
from test.engine.conftest import running_stages
from test.engine.turns import greedy_turn, reply_of, think, user

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

SYSTEM = "You are brief."
N_TOKENS = 12


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stateless(endless_checkpoint, tmp_path_factory):
    cache = tmp_path_factory.mktemp("stateless")
    stages = running_stages(
        endless_checkpoint,
        cache,
        {},
        thinker_environment=STATELESS,
        policies=(),
        names=("thinker",),
    )
    async with stages as running:
        yield running


async def conversation(stages, said: list) -> list:
    """Three turns; the second response is interrupted. What each turn ended with."""
    links, history, found = stages.links(f"talk-{id(said)}"), [], []
    for n, words in enumerate(said):
        history.append(user(*words))
        turn = greedy_turn(*history, system=SYSTEM, n_tokens=200 if n == 1 else N_TOKENS)
        done = await think(links, turn, interrupt_after=3 if n == 1 else None)
        history.append(reply_of(turn, done))
        found.append(done)
    links.close()
    return found


async def test_turns_have_the_tokens_of_sessions(stateless, stages, speech):
    said = [[speech[:16_000]], ["And now?"], [speech[8_000:24_000], "Well?"]]
    ours, theirs = await conversation(stages, said), await conversation(stateless, said)
    assert ours[0].ids == theirs[0].ids
    assert [done.n_audio for done in ours] == [done.n_audio for done in theirs]


async def test_a_turn_finds_the_kv_of_earlier_ones(stateless, speech):
    first, second, third = await conversation(
        stateless, [[speech[:16_000]], [speech[16_000:32_000]], [speech[:8_000]]]
    )
    assert first.n_cached == 0
    assert second.n_cached > first.n_prompt - 8
    assert third.n_cached > second.n_prompt - 8


async def test_the_talker_gets_the_states_of_a_clip_whose_turn_was_cancelled(stateless, speech):
    links = stateless.links("cancelled")
    first, second = user(speech[:16_000]), user(speech[16_000:24_000])
    async with links.thinker.open(greedy_turn(first, system=SYSTEM, n_tokens=200)) as thought:
        async for _ in thought.tokens():
            break
    both = greedy_turn(first, second, system=SYSTEM, n_tokens=N_TOKENS)
    alone = greedy_turn(
        user(speech[:16_000]), user(speech[16_000:24_000]), system=SYSTEM, n_tokens=N_TOKENS
    )
    done, anew = await think(links, both), await think(stateless.links("anew"), alone)
    links.close()
    assert done.n_cached > 16
    assert (done.ids, done.n_audio) == (anew.ids, anew.n_audio)
