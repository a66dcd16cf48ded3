"""Several ranks have the tokens and codes of one rank, and decide alike in every round.

A sum over two shards differs in its last bits from a sum over all. The compared tokens and codes
are those of transformers, whose sums differ likewise: their best candidates are far enough apart.
Log-probabilities agree to 1e-5.
"""

import asyncio
import json
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio

from sglang_live.models.demo.build import build
from sglang_live.models.demo.location import DemoSize
from test.engine import parity_claims
from test.engine.conftest import IS_NIGHTLY, Reference, Stages
from test.engine.random_load import RandomLoad, compared, settled, stages_of_ranks
from test.engine.small_pool import Pool, check
from test.engine.turns import greedy_turn, speak, think, user

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.asyncio(loop_scope="session"),
]

N_ROUNDS = 10_000 if IS_NIGHTLY else 400


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ranks(endless_checkpoint, logs):
    async with stages_of_ranks(endless_checkpoint, logs, 2) as running:
        yield running


async def test_the_thinker_matches_the_reference_on_audio(ranks, reference, speech):
    clips = [speech[:64_000], speech[:7_680]]
    await parity_claims.thinker_matches_the_reference_on_audio(ranks, reference, clips)


async def test_the_talker_matches_the_reference(ranks, reference, speech):
    await parity_claims.talker_matches_the_reference(ranks, reference, speech, 60)


async def test_log_probabilities_are_those_of_the_reference(ranks, reference):
    pool, rng = Pool(ranks), random.Random(3)
    await pool.open("exact")
    heard: list[int] = []
    said: list[tuple[int, float]] = []
    for _ in range(4):
        new = [rng.randrange(10, 200) for _ in range(rng.randrange(5, 90))]
        heard += new
        for token, logprob in await pool.say("exact", new, 12):
            said.append((len(heard), logprob))
            heard.append(token)
    check(reference, heard, said)
    await pool.close("exact")


async def sampled_codes(stages: Stages) -> list[np.ndarray]:
    """Of four responses at once, sampled from their seeds with repetition penalty."""

    async def one(seed: int) -> np.ndarray:
        links = stages.links(f"sampled-{seed}-{id(stages)}")
        turn = greedy_turn(user(f"tell me {seed}"), system="", n_tokens=8)
        await think(links, turn)
        turn = replace(turn, temperature=None, seed=1000 + seed)
        codes = await speak(links, turn, list(range(20, 60)), 30)
        links.close()
        return codes

    return await asyncio.gather(*(one(seed) for seed in range(4)))


async def test_sampled_codes_are_those_of_one_rank(ranks, stages):
    expected = await sampled_codes(stages)
    assert len({codes.tobytes() for codes in expected}) == 4
    np.testing.assert_array_equal(await sampled_codes(ranks), expected)


async def test_ranks_decide_alike_in_every_round(ranks, logs):
    """With every policy, and memory for a few sessions only."""
    await RandomLoad(ranks, logs, N_ROUNDS, seed=1).run()
    await settled(logs)
    for name in ("thinker", "talker"):
        assert compared(logs, name) >= N_ROUNDS
    loads = [(await ranks.replica(name).client.ping(5.0)).load for name in ("thinker", "talker")]
    happened = Counter({name: sum(load.get(name, 0.0) for load in loads) for name in WHAT})
    assert all(happened[name] > 0 for name in WHAT), happened


async def test_four_ranks_match_the_reference_and_decide_alike(tmp_path, speech):
    """More ranks than KV heads: two have equal ones."""
    checkpoint, logs = tmp_path / "wide", tmp_path / "logs"
    logs.mkdir()
    endless = DemoSize(thinker_end_logit=0.0, talker_end_logit=0.0)
    build(checkpoint, replace(endless, encoder_hidden=64, vision_hidden=64))
    async with stages_of_ranks(checkpoint, logs, 4) as ranks:
        reference = Reference.load(checkpoint)
        clips = [speech[:64_000], speech[:7_680]]
        await parity_claims.thinker_matches_the_reference_on_audio(ranks, reference, clips)
        await parity_claims.talker_matches_the_reference(ranks, reference, speech, 60)
        await RandomLoad(ranks, logs, 400, seed=2).run()
        await settled(logs)
        for name in ("thinker", "talker"):
            assert compared(logs, name) >= 400


async def test_a_rank_that_decides_otherwise_is_found(tmp_path):
    for rank, batch in enumerate(("a", "b")):
        line = json.dumps({"round": 1, "batch": batch}) + "\n"
        (tmp_path / f"thinker-rank{rank}.jsonl").write_text(line)
    with pytest.raises(AssertionError, match="thinker, line 1: batch: a against b"):
        compared(tmp_path, "thinker")


# Without these the claim above would say little.
WHAT = (
    "policy_pauses",
    "policy_retracted",
    "policy_sessions_evicted",
    "policy_sessions_compacted",
    "policy_loads",
    "policy_tokens_written",
    "policy_truncated",
    "policy_be_decode_steps",
    "policy_be_prefill_tokens",
    "policy_be_pauses",
)
