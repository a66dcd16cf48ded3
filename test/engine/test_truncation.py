"""After an interruption the model continues from the heard tokens, without a new prefill of them.

Responses are truncated at random points, while they run and after; the next turn must have the
tokens of a run without the truncated part.
"""

import asyncio
import random

import numpy as np
import pytest
import pytest_asyncio

from sglang_live.core import FRAME_S, HistoryItem, TextPart
from sglang_live.messages import ThinkerDone
from test.engine.conftest import Stages, running_stages
from test.engine.reference import AUDIO, chat
from test.engine.turns import greedy_turn, reply_of, speak, think, user

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

SYSTEM = "You are a kind assistant."
POLICIES = ("urgency", "pacing", "truncate")
N_POINTS = 100
AT_ONCE = 10
WORDS = ["why", "where", "go", "on", "tell", "me", "more", "what", "of", "it", "and", "then"]


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=[1, 16], ids=["page-1", "page-16-no-overlap"]
)
async def page_and_stages(request, endless_checkpoint, tmp_path_factory):
    page = request.param
    args = {"page_size": page, "disable_overlap_schedule": page > 1, "max_running_requests": 64}
    cache = tmp_path_factory.mktemp(f"truncation-{page}")
    async with running_stages(endless_checkpoint, cache, args, policies=POLICIES) as running:
        yield page, running


async def interrupted(links, turn, n_tokens: int) -> ThinkerDone:
    """Interrupt the response after about n_tokens.

    Its consumer keeps up, so the engine is never far ahead.
    """
    seen = 0
    async with links.thinker.open(turn) as thought:
        async for tokens in thought.tokens():
            seen += len(tokens.ids)
            thought.report(seen * FRAME_S, False)
            if seen >= n_tokens:
                thought.interrupt()
                n_tokens = 1 << 30
    return thought.done


def first_tokens(response: HistoryItem, n: int) -> list[HistoryItem]:
    """The heard part of a response: nothing, or its first tokens under a new key."""
    if n == 0:
        return []
    ids = response.token_ids[:n]
    part = (TextPart("heard"),)
    key = f"{response.key}-cut-{n}"
    return [HistoryItem(key=key, role="assistant", parts=part, token_ids=ids)]


async def truncate_and_continue(stages: Stages, seed: int, clip: np.ndarray, page: int) -> bool:
    """Run a session of three turns with an interrupted response.

    Returns whether the response was truncated.
    """
    rng = random.Random(seed)
    links, alone = stages.links(f"cut-{page}-{seed}"), stages.links("")
    history = [user(" ".join(rng.sample(WORDS, 3)))]
    if seed % 3 == 0:
        history = [user(clip)]
    turn = greedy_turn(*history, system=SYSTEM, n_tokens=60)
    if seed % 2:
        # Much longer than the truncation point: the response must not end before it.
        turn = greedy_turn(*history, system=SYSTEM, n_tokens=600)
        done = await interrupted(links, turn, rng.randrange(1, 50))
        assert done.finish == "interrupted"
        assert len(done.ids) < 600
    else:
        done = await think(links, turn)  # interrupted during playback: all tokens are written
    heard = rng.randrange(0, len(done.ids) + 1)
    history += first_tokens(reply_of(turn, done), heard)
    history.append(user(rng.choice(WORDS)))
    again = greedy_turn(*history, system=SYSTEM, n_tokens=12)
    after = await think(links, again)
    assert not after.rebuilt, f"seed {seed}: {heard} of {len(done.ids)}"
    fresh = await think(alone, greedy_turn(*history, system=SYSTEM, n_tokens=12))
    assert after.ids == fresh.ids, f"seed {seed}: {heard} of {len(done.ids)}"
    assert after.n_prompt == fresh.n_prompt
    if heard:
        # The newest token's KV is written by the next step, which may not have run.
        n_kept = done.n_prompt + heard
        assert n_kept - 1 <= after.n_cached <= n_kept
    else:
        assert 0 < after.n_cached < done.n_prompt
    # The session continues normally.
    history += [reply_of(again, after), user("go on")]
    third = await think(links, greedy_turn(*history, system=SYSTEM, n_tokens=8))
    fresh = await think(alone, greedy_turn(*history, system=SYSTEM, n_tokens=8))
    assert third.ids == fresh.ids
    links.close()
    return heard < len(done.ids)


async def test_the_thinker_continues_from_the_heard_tokens(page_and_stages, speech):
    page, stages = page_and_stages
    cut = []
    for first in range(0, N_POINTS, AT_ONCE):
        seeds = range(first, first + AT_ONCE)
        cut += await asyncio.gather(
            *(
                truncate_and_continue(stages, seed, speech[8_000 * (seed % 9) :][:24_000], page)
                for seed in seeds
            )
        )
    assert len(cut) == N_POINTS
    ready = await stages.replica("thinker").client.ping(5.0)
    assert ready.load["sessions_rebuilt"] == 0
    assert ready.load["sessions_truncated"] == sum(cut)


async def test_a_response_that_differs_in_the_history_is_replaced(page_and_stages):
    _, stages = page_and_stages
    links = stages.links("whole")
    turn = greedy_turn(user("tell me more"), system=SYSTEM, n_tokens=20)
    done = await think(links, turn)
    longer = HistoryItem(
        key="longer",
        role="assistant",
        parts=(TextPart("x"),),
        token_ids=(*done.ids, 11, 12),
    )
    history = (*turn.history, longer, user("why"))
    after = await think(links, greedy_turn(*history, system=SYSTEM, n_tokens=8))
    assert not after.rebuilt
    assert 0 < after.n_cached < done.n_prompt  # tokens before it stay
    fresh = await think(stages.links(""), greedy_turn(*history, system=SYSTEM, n_tokens=8))
    assert after.ids == fresh.ids
    links.close()


async def test_truncation_does_not_change_the_talkers_next_response(
    page_and_stages, reference, speech
):
    """Its prompt has only the user's messages, and no part of a truncated response."""
    page, stages = page_and_stages
    rng = random.Random(page)
    clips = [speech[:24_000], speech[40_000:72_000]]
    inputs = reference.inputs(
        chat(SYSTEM, ("user", AUDIO), ("user", AUDIO)),
        clips,
    )
    reply_ids, codes = reference.speak(inputs, 24, 40)
    first, second = user(clips[0]), user(clips[1])

    async def session(number: int) -> None:
        links = stages.links(f"talk-{page}-{number}")
        turn = greedy_turn(first, system=SYSTEM, n_tokens=60)
        await think(links, turn)
        async with links.talker.open(turn) as speech_job:
            spoken = list(range(20, 60))
            await speech_job.write(spoken, "a")
            stop_at, n_frames = rng.randrange(1, 30), 0
            async for _ in speech_job.frames():
                n_frames = speech_job.n_frames
                if n_frames >= stop_at:
                    break
        again = greedy_turn(first, second, system=SYSTEM, n_tokens=len(reply_ids))
        done = await think(links, again)
        assert done.ids == reply_ids
        heard = await speak(links, again, reply_ids[:-1], 40)
        np.testing.assert_array_equal(heard, codes[:40])
        links.close()

    for _ in range(0, N_POINTS // 5, 5):
        await asyncio.gather(*(session(rng.randrange(1 << 30)) for _ in range(5)))
