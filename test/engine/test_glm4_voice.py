"""GLM-4-Voice in its thinker stage, on tiny random weights: ids of text and speech equal those of
transformers, and after an interruption the model goes on behind what was heard of both."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from lab.poison import POISON
from sglang_live.core import HistoryItem, TextPart, TurnRequest
from sglang_live.kv.retention import RetentionConfig
from sglang_live.messages import TextTokens, ThinkerDone
from sglang_live.models.glm4_voice import family
from test.engine.conftest import Stages, running_stages
from test.engine.turns import greedy_turn, reply_of, think, user
from test.glm4_voice import checkpoint as tiny
from test.glm4_voice.reference import Model
from test.unit.models.test_glm4_voice import tones

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

POLICIES = ("urgency", "pacing", "truncate", "retention", "next-use")
SYSTEM = "Be kind."
N_IDS = 40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("glm") / "checkpoint")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stages(checkpoint, tmp_path_factory):
    running = running_stages(
        checkpoint,
        tmp_path_factory.mktemp("glm-stages"),
        policies=POLICIES,
        thinker_environment=POISON,
        names=("thinker",),
        family=family.__name__,
    )
    async with running as started:
        yield started


@pytest.fixture(scope="module")
def model(checkpoint) -> Model:
    return Model(checkpoint, SYSTEM)


async def written(stages: Stages, turn: TurnRequest) -> tuple[ThinkerDone, list[TextTokens]]:
    found = []
    async with stages.links("").thinker.open(turn) as thought:
        async for tokens in thought.tokens():
            found.append(tokens)
    assert thought.done is not None
    return thought.done, found


async def test_ids_of_both_kinds_equal_the_references_in_any_batch(stages, model):
    said: list[np.ndarray | str] = [tones(2.5), "tell me of the little list", tones(0.7)]
    turns = [greedy_turn(user(one), system=SYSTEM, n_tokens=N_IDS) for one in said]
    for turn, one, (done, parts) in zip(
        turns, said, await asyncio.gather(*(written(stages, turn) for turn in turns)), strict=True
    ):
        prompt = model.ids(turn.history[0] if isinstance(one, str) else one)
        assert done.ids == model.response(prompt, N_IDS) and done.n_prompt == len(prompt)
        codes = [token - tiny.FIRST_CODE for token in done.ids if token >= tiny.FIRST_CODE]
        assert 5 < len(codes) < N_IDS - 5
        spoken = np.frombuffer(b"".join(part.codes for part in parts), "<i2").tolist()
        assert spoken == codes
        text = [token for token in done.ids if token < tiny.FIRST_CODE]
        assert "".join(part.text for part in parts) == done.text
        assert done.text == model.prompt.text_of(text).rstrip("\ufffd")
        ends = [mark for part in parts for mark in part.spoken]
        at = [n + 1 for n, token in enumerate(done.ids) if token >= tiny.FIRST_CODE]
        assert ends == [(n, pytest.approx(0.08 * (i + 1))) for i, n in enumerate(at)]


async def test_after_an_interruption_it_goes_on_behind_what_was_heard_of_both(stages, model):
    links = stages.links("talk")
    first, clip = user("the end"), tones(1.3)
    turn = greedy_turn(first, system=SYSTEM, n_tokens=600)
    done = await think(links, turn, interrupt_after=30)
    assert done.finish == "interrupted" and 30 <= len(done.ids) < 600
    prompt = model.ids(first)
    assert done.ids == model.response(prompt, len(done.ids))
    heard = HistoryItem(
        key="heard", role="assistant", parts=(TextPart("x"),), token_ids=tuple(done.ids[:17])
    )
    again = greedy_turn(first, heard, user(clip), system=SYSTEM, n_tokens=N_IDS)
    after = await think(links, again)
    whole = model.ids(first, heard, clip)
    assert not after.rebuilt and after.n_prompt == len(whole)
    assert after.ids == model.response(whole, N_IDS)
    n_kept = len(prompt) + 17
    assert n_kept - 1 <= after.n_cached <= n_kept
    third = greedy_turn(*again.history, reply_of(again, after), first, system=SYSTEM, n_tokens=8)
    done = await think(links, third)
    assert not done.rebuilt
    assert done.ids == model.response(model.ids(first, heard, clip, *third.history[3:]), 8)
    links.close()


async def test_old_ids_of_both_kinds_leave_a_bounded_session(stages):
    links, history = stages.links("long"), []
    bound = RetentionConfig(sink_tokens=None, window_tokens=120, slack_tokens=8)
    for n in range(6):
        history.append(user(tones(1.0 + 0.1 * n)))
        turn = greedy_turn(*history, system=SYSTEM, n_tokens=N_IDS)
        done = await think(links, replace(turn, retention=bound))
        assert done.rebuilt is False and len(done.ids) == N_IDS
        history = [item for item in (*history, reply_of(turn, done)) if item.key not in done.gone]
    assert len(history) < 12
    links.close()
