"""Turn prefill: an utterance is prefilled in pieces while it is spoken, as one message.

Turns are divided into random pieces; some end early, some turn out to be none, some start a
speculative turn. The response must equal that of a run with the same pieces at once.
"""

import asyncio
import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio
import torch

from sglang_live.core import INPUT_RATE_HZ, AudioPart, HistoryItem
from test.engine.conftest import Stages, running_stages
from test.engine.reference import chat
from test.engine.turns import greedy_turn, reply_of, think, user

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

SYSTEM = "You are a kind assistant."
POLICIES = ("urgency", "pacing", "truncate", "turn-prefill")
N_CALLS, AT_ONCE = 48, 8
_count = itertools.count()


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=[1, 16], ids=["page-1", "page-16-no-overlap"]
)
async def stages(request, endless_checkpoint, tmp_path_factory):
    page = request.param
    args = {"page_size": page, "disable_overlap_schedule": page > 1, "max_running_requests": 32}
    cache = tmp_path_factory.mktemp(f"turn-prefill-{page}")
    async with running_stages(
        endless_checkpoint, cache, args, policies=POLICIES, names=("thinker",)
    ) as running:
        yield running


def pieces(pcm: np.ndarray, seconds: list[int]) -> list[HistoryItem]:
    """Pieces of an utterance; none of them ends it."""
    ends = np.cumsum([s * INPUT_RATE_HZ for s in seconds])
    return [
        HistoryItem(
            key=f"piece-{next(_count)}",
            role="user",
            parts=(AudioPart(part),),
            opens=i == 0,
            closes=False,
        )
        for i, part in enumerate(np.split(pcm, ends)[: len(seconds)])
    ]


def ended(prefilled: list[HistoryItem], rest: np.ndarray) -> list[HistoryItem]:
    last = HistoryItem(
        key=f"rest-{next(_count)}",
        role="user",
        parts=(AudioPart(rest),),
        opens=not prefilled,
        closes=True,
    )
    return [*prefilled, last]


async def prefill_turn(links, history: list[HistoryItem]) -> None:
    turn = greedy_turn(*history, system=SYSTEM, n_tokens=8)
    assert (await think(links, replace(turn, prefill_only=True))).ids == []


async def session(stages: Stages, seed: int, speech: np.ndarray) -> None:
    rng = random.Random(seed)
    links, alone = stages.links(f"in-{seed}-{next(_count)}"), stages.links("")
    turn = greedy_turn(user("tell me more"), system=SYSTEM, n_tokens=20)
    history = [*turn.history, reply_of(turn, await think(links, turn))]
    for _ in range(2):
        pcm = speech[rng.randrange(16_000) :]
        said = pieces(pcm, [rng.randint(1, 3) for _ in range(rng.randint(1, 3))])
        for n in range(1, len(said) + 1):
            await prefill_turn(links, [*history, *said[:n]])
        kind = rng.choice(["all of it", "less of it", "no turn", "response cut"])
        if kind == "less of it":
            said = said[:-1]
        if kind == "response cut":
            whole = history[-1]
            cut = whole.token_ids[: rng.randint(1, len(whole.token_ids) - 1)]
            history[-1] = replace(whole, key=f"{whole.key}-{next(_count)}", token_ids=cut)
        speculation = rng.choice(["none", "wrong", "withdrawn", "right"])
        rest = pcm[sum(len(p.parts[0].pcm) for p in said) :][: rng.randint(4_000, 30_000)]
        new = [user("never mind")] if kind == "no turn" else ended(said, rest)
        if speculation in ("wrong", "withdrawn"):
            early = ended(said, rest[: len(rest) // 2])
            n_tokens = rng.randint(1, 12)
            stop = n_tokens if speculation == "withdrawn" else None
            turn = greedy_turn(*history, *early, system=SYSTEM, n_tokens=200 if stop else n_tokens)
            early_done = await think(links, replace(turn, speculative=True), stop)
            assert (early_done.finish == "interrupted") == (stop is not None)
        history += new
        turn = greedy_turn(*history, system=SYSTEM, n_tokens=12)
        done = await think(links, replace(turn, speculative=speculation == "right"))
        assert not done.rebuilt, f"seed {seed}: {kind}"
        fresh = await think(alone, greedy_turn(*history, system=SYSTEM, n_tokens=12))
        assert done.ids == fresh.ids, f"seed {seed}: {kind}"
        assert done.n_prompt == fresh.n_prompt, f"seed {seed}: {kind}"
        if kind == "all of it":
            assert done.n_audio <= 1 + len(rest) * 13 // INPUT_RATE_HZ, "heard twice"
        history.append(reply_of(turn, done))
    links.close()


async def test_turn_prefill_gives_the_tokens_of_one_prefill(stages, speech):
    for first in range(0, N_CALLS, AT_ONCE):
        seeds = range(first, first + AT_ONCE)
        await asyncio.gather(*(session(stages, seed, speech) for seed in seeds))
    ready = await stages.replica("thinker").client.ping(5.0)
    assert ready.load["sessions_rebuilt"] == 0


async def test_turn_prefill_matches_the_reference_on_the_same_clips(stages, reference, speech):
    said = pieces(speech, [2, 1, 3])
    message = ended(said, speech[6 * INPUT_RATE_HZ :][:20_000])
    links = stages.links(f"reference-{next(_count)}")
    for n in range(1, len(said) + 1):
        await prefill_turn(links, said[:n])
    done = await think(links, greedy_turn(*message, system=SYSTEM, n_tokens=24))
    links.close()
    place = "<|audio_start|><|audio_pad|><|audio_end|>"
    clips = [reference.inputs(place, [item.parts[0].pcm]) for item in message]
    pad_id = reference.model.thinker.config.audio_token_id
    n_places = sum(int((clip["input_ids"] == pad_id).sum()) for clip in clips)
    [text] = reference.processor.tokenizer([chat(SYSTEM, ("user", place))]).input_ids
    at = text.index(pad_id)
    prompt = [*text[:at], *[pad_id] * n_places, *text[at + 1 :]]
    assert done.n_prompt == len(prompt)
    ids = torch.tensor([[*prompt, *done.ids]])
    logprobs = reference.logprobs(
        {"input_ids": ids, "clips": clips}, len(prompt), [0] * len(ids[0])
    )
    assert logprobs[len(prompt) - 1 : -1].argmax(-1).tolist() == done.ids


async def test_after_a_kill_the_beginning_of_speech_builds_the_conversation_anew(stages, speech):
    """Two sessions lose their KV with their thinker's process; the user of one begins to speak."""
    replica = stages.replica("thinker")
    sessions = []
    for name in ("preheated", "left-alone"):
        links = stages.links(f"{name}-{next(_count)}")
        turn = greedy_turn(
            user("tell me more " * 60, speech[: 9 * INPUT_RATE_HZ]), system=SYSTEM, n_tokens=8
        )
        sessions.append((links, [*turn.history, reply_of(turn, await think(links, turn))]))
    replica.process.kill()
    async with asyncio.timeout(90):
        while replica.is_up:
            await asyncio.sleep(0.05)
        while not replica.is_up:
            await asyncio.sleep(0.05)
    links, history = sessions[0]
    speaks = greedy_turn(*history, system=SYSTEM, n_tokens=8)
    for _ in range(2):
        await think(links, replace(speaks, prefill_only=True, preheat=True))
    turns = []
    for links, history in sessions:
        turn = greedy_turn(*history, user("and now?"), system=SYSTEM, n_tokens=8)
        done = await think(links, turn)
        fresh = await think(stages.links(""), turn)
        assert done.ids == fresh.ids and done.n_prompt == fresh.n_prompt
        turns.append(done)
        links.close()
    preheated, left_alone = turns
    assert preheated.n_prompt - preheated.n_cached < 40, "the turn computed more than its message"
    assert preheated.n_audio == 0 and left_alone.n_audio > 100
    load = (await replica.client.ping(5.0)).load
    assert (load["preheats"], load["preheats_needless"], load["preheats_unused"]) == (1, 1, 0)
