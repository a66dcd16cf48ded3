"""The same claims for other settings of SGLang: overlap off, pages of 16, HiCache, small chunks.

The talker also retracts a running response every few rounds.
"""

import pytest
import pytest_asyncio

from test.engine import parity_claims
from test.engine.conftest import running_stages

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.asyncio(loop_scope="session"),
]

CHUNKS = {"chunked_prefill_size": 64}
ENGINE_ARGS = {
    **CHUNKS,
    "disable_overlap_schedule": True,
    "page_size": 16,
    "enable_hierarchical_cache": True,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
    "hicache_ratio": 1.5,
}
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def plain_stages(endless_checkpoint, tmp_path_factory):
    cache = tmp_path_factory.mktemp("plain")
    async with running_stages(endless_checkpoint, cache, ENGINE_ARGS, RETRACT) as running:
        yield running


async def test_thinker_matches_the_reference_on_audio(plain_stages, reference, speech):
    await parity_claims.thinker_matches_the_reference_on_audio(
        plain_stages, reference, [speech[:64_000]]
    )


async def test_turns_of_a_session_equal_one_stateless_run(plain_stages, reference, speech):
    await parity_claims.turns_equal_one_stateless_run(plain_stages, reference, speech)


async def test_retracted_starving_streams_match_the_reference(plain_stages, reference, speech):
    await parity_claims.eight_starving_streams_match(plain_stages, reference, speech, 60)
    # Without retractions the claim would be empty.
    log = plain_stages.supervisor.log_of("talker/0")
    assert "Testing retraction" in log
