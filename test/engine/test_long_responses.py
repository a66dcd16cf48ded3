"""A long response keeps its prompt and a window of its speech, in any pool.

The reference's frames have the same attention range. Dropped KV is overwritten with NaN.
"""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio

from lab.poison import POISON
from sglang_live.kv.retention import RetentionConfig
from test.engine.conftest import running_stages
from test.engine.gauges import total, until, until_idle
from test.engine.losses import codes_with_loss
from test.engine.reference import AUDIO, chat
from test.engine.turns import greedy_turn, speak, think, user

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

WINDOW, SLACK = 24, 8
N_FRAMES = 240
POLICIES = ("urgency", "pacing", "truncate", "retention")
# (page size, overlap)
VARIANTS = {"page-1": (1, True), "page-16-no-overlap": (16, False)}
NAMES = ("thinker", "talker")


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=VARIANTS.values(), ids=VARIANTS.keys()
)
async def bounded(request, endless_checkpoint, tmp_path_factory):
    """The stages, and their page size."""
    page, overlap = request.param
    args = {"page_size": page, "disable_overlap_schedule": not overlap}
    cache = tmp_path_factory.mktemp("long")
    stages = running_stages(
        endless_checkpoint,
        cache,
        args,
        talker_environment=POISON,
        policies=POLICIES,
        names=NAMES,
    )
    async with stages as running:
        yield running, page


class Sight:
    """The attention range of each frame of a bounded response; called in the order of frames."""

    def __init__(self, page: int):
        self.page, self.n_dropped = page, 0

    def __call__(self, n_prompt: int, frame: int) -> tuple[int, int]:
        page = self.page
        sink = -(-n_prompt // page) * page
        resident = n_prompt + frame - self.n_dropped
        if resident > n_prompt + WINDOW + SLACK + 2 * page:
            self.n_dropped += (resident - WINDOW) // page * page - sink
        return sink, sink + self.n_dropped


async def test_long_responses_have_the_codes_of_a_windowed_reference(bounded, reference, speech):
    stages, page = bounded
    retention = RetentionConfig(window_tokens=WINDOW, slack_tokens=SLACK)
    jobs = []
    for n in range(2):
        clip, sight = speech[8_000 * n : 8_000 * n + 24_000 + 1_600 * n], Sight(page)
        inputs = reference.inputs(chat("", ("user", AUDIO)), [clip])
        reply_ids, codes = reference.speak(inputs, 20 + 3 * n, N_FRAMES, sight)
        assert sight.n_dropped > N_FRAMES - 2 * (WINDOW + SLACK + 2 * page)
        links = stages.links(f"long-{n}")
        turn = greedy_turn(user(clip), system="", n_tokens=len(reply_ids))
        assert (await think(links, turn)).ids == reply_ids
        jobs.append((links, replace(turn, retention=retention), reply_ids, codes))
    heard = await asyncio.gather(
        *(
            speak(links, turn, ids[:-1], N_FRAMES, start_after_s=0.3 * n)
            for n, (links, turn, ids, _) in enumerate(jobs)
        )
    )
    for (links, _, _, codes), got in zip(jobs, heard, strict=True):
        links.close()
        np.testing.assert_array_equal(got, codes[:N_FRAMES])
    n_dropped = await total(stages, "talker", "policy_frames_compacted")
    assert n_dropped >= 2 * (N_FRAMES - 2 * (WINDOW + SLACK + 2 * page))
    await until_idle(stages, "talker")


async def test_a_long_response_that_is_lost_early_has_the_same_codes(bounded):
    """The frames that another engine has made are dropped in their order, as all others."""
    stages, page = bounded
    retention = RetentionConfig(window_tokens=WINDOW, slack_tokens=SLACK)
    turn = greedy_turn(system="", n_tokens=12)
    turn = replace(turn, retention=retention, temperature=None, seed=3)
    found = []
    for n_lost in (0, 1, 8):
        links = stages.links(f"lost-{n_lost}")
        own = replace(turn, turn_id=f"lost-{n_lost}-000001")
        found.append(await codes_with_loss(links, own, [5] * 12, n_lost, N_FRAMES // 2))
        links.close()
    assert len(found[0]) > WINDOW + SLACK + 3 * page
    for codes in found[1:]:
        np.testing.assert_array_equal(codes, found[0])
    await until_idle(stages, "talker")


async def test_a_prompt_whose_first_message_is_dropped_leaves_out_half_of_the_rest(bounded):
    """Its codes are those of a session that has only the messages that are left."""
    stages, _ = bounded
    retention = RetentionConfig(window_tokens=WINDOW, slack_tokens=SLACK)
    told = [user(f"tell me {n}") for n in range(6)]

    async def codes(links, *history) -> np.ndarray:
        turn = replace(greedy_turn(*history, system="", n_tokens=4), retention=retention)
        await think(links, turn)
        return await speak(links, turn, list(range(20, 40)), 8)

    links, n_before = stages.links("halved"), await total(stages, "talker", "prompts_begun_anew")
    await codes(links, *told[:4])
    for history, read in ((told[1:5], told[3:5]), (told[2:6], told[3:6])):
        got, alone = await codes(links, *history), stages.links(f"reads-{len(read)}")
        np.testing.assert_array_equal(got, await codes(alone, *read))
        alone.close()
    links.close()
    await until(stages, "talker", "prompts_begun_anew", lambda n: n > n_before)
    assert await total(stages, "talker", "prompts_begun_anew") == n_before + 1


POOL_TOKENS = 140


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cramped(endless_checkpoint, tmp_path_factory):
    """Hardly room for three bounded responses, and not enough for one unbounded one.

    SGLang's test mode also retracts responses regularly.
    """
    cache = tmp_path_factory.mktemp("long_cramped")
    args = {"max_total_tokens": POOL_TOKENS}
    environment = {
        # Without it, SGLang reserves room for a whole response, and admits one at a time.
        "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8",
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "23",
        **POISON,
    }
    stages = running_stages(
        endless_checkpoint,
        cache,
        args,
        environment,
        policies=POLICIES,
        names=NAMES,
        thinker_args={"max_total_tokens": 2000},
    )
    async with stages as running:
        yield running


async def test_responses_longer_than_the_pool_run_concurrently(cramped):
    retention = RetentionConfig(window_tokens=WINDOW, slack_tokens=SLACK)
    jobs = []
    for n in range(3):
        turn = greedy_turn(user(f"tell me {n}"), system="", n_tokens=4)
        links = cramped.links(f"side-{n}")
        await think(links, turn)
        jobs.append((links, replace(turn, temperature=None, seed=n, retention=retention)))
    heard = await asyncio.gather(
        *(speak(links, turn, list(range(20, 60)), N_FRAMES) for links, turn in jobs)
    )
    for (links, _), codes in zip(jobs, heard, strict=True):
        links.close()
        assert codes.shape == (N_FRAMES, 16)
        # Sampled codes vary; reading NaN would make them constant.
        assert len(np.unique(codes[-WINDOW:, 0])) > WINDOW // 4
    await until(cramped, "talker", "policy_retracted", lambda n: n > 0)
    await until_idle(cramped, "talker")


async def test_a_history_too_long_for_the_talker_still_gets_speech(cramped):
    """The talker's pool is smaller: it speaks without the messages that do not fit."""
    n_before = await total(cramped, "talker", "segments_left_out")
    links, long = cramped.links("unread"), user("tell me more " * 100)
    for history in ((long,), (user("why"), long, user("go on"))):
        turn = greedy_turn(*history, system="", n_tokens=4)
        assert (await think(links, turn)).n_prompt > POOL_TOKENS
        heard = await speak(links, turn, list(range(20, 30)), 8)
        assert heard.shape == (8, 16)
    links.close()
    await until(cramped, "talker", "segments_left_out", lambda n: n > n_before + 2)
    assert await total(cramped, "talker", "segments_left_out") == n_before + 1 + 2
