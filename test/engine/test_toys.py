"""A family of each kind from a folder outside the package (test/toys), in its talker stage."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio
import torch

from sglang_live.clock import MonotonicClock
from sglang_live.errors import StageFailedError
from sglang_live.messages import TalkerInput
from sglang_live.models.codecs import END_CODE
from sglang_live.models.family import family_at, model_facts, part
from sglang_live.orchestrator.stage_links import TalkerLink
from sglang_live.stages.talker.piece_speech import PieceSpeech
from test.engine.conftest import Stages, running_stages
from test.engine.test_moshi import Talk
from test.engine.turns import greedy_turn, user
from test.toys import delay, depth, duplex, pieces
from test.toys.counting import N_CODES, VOICE

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

TEXTS = ("Hello, my friend. This is the case.", "What a case!", "A piece of cake, and a rest.")


def started(kind, folder):
    path = kind.build(folder / "checkpoint")
    args = {"max_running_requests": 8, "max_total_tokens": 4096, "disable_overlap_schedule": True}
    names, family = ("talker",), kind.__name__
    return running_stages(path, folder, names=names, family=family, talker_args=args)


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=[pieces, delay, depth])
async def speaking(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    async with started(request.param, folder) as stages:
        yield request.param, stages, folder / "checkpoint"


async def frames(stages: Stages, kind, n: int, voice: str = VOICE) -> list[list[int]]:
    """Of a text, without the marks behind its pieces."""
    turn = replace(greedy_turn(user("go on"), system="", n_tokens=4), voice=voice)
    talker, found = TalkerLink(stages.replica("talker"), f"t-{n}", reads_text=True), []
    async with talker.open(replace(turn, turn_id=f"toy-{n}")) as speech:
        await speech.write([0], TEXTS[n])
        await speech.end_text()
        async with aclosing(speech.frames()) as chunks:
            async for some in chunks:
                found += np.frombuffer(some, "<i2").reshape(-1, kind.N_BOOKS).tolist()
    talker.close()
    return [frame for frame in found if frame[0] != END_CODE]


async def test_texts_that_share_batches_are_spoken_to_their_ends(speaking):
    kind, stages, path = speaking
    facts = model_facts(path, kind.__name__)
    assert (facts.family, facts.voices) == (kind.__name__, (VOICE,))
    found = await asyncio.gather(*(frames(stages, kind, n) for n in range(len(TEXTS))))
    talker = part(family_at(facts.family).talker)(path)
    for text, spoken in zip(TEXTS, found, strict=True):
        cut, wanted = PieceSpeech(talker, MonotonicClock()), []
        cut.add(TalkerInput("job", [], True, text, 1))
        while (piece := await cut.next()) is not None:
            wanted += kind.expected(piece.spoken)
        assert spoken == wanted and len(wanted) > 10
    with pytest.raises(StageFailedError, match="is not one of"):
        await frames(stages, kind, 0, voice="erik")


async def test_a_parrot_hears_while_it_speaks(tmp_path):
    heard = torch.randint(0, N_CODES, (300, duplex.N_BOOKS), generator=torch.manual_seed(1))
    async with (
        started(duplex, tmp_path) as stages,
        Talk(stages, "parrot", voice=VOICE) as talk,
    ):
        for frame in heard:
            await talk.say(frame)
            await talk.take()
    # Longer than what its context and its KV hold.
    assert talk.frames == [
        [n % duplex.VOCAB, *codes] for n, codes in enumerate([[0, 0], *heard.tolist()])
    ]
    assert talk.sounds == [[0, 0], *heard[:-1].tolist()]
    decoder = part(family_at(duplex.__name__).decoder).from_pretrained(
        tmp_path / "checkpoint", device="cpu", dtype=torch.float32
    )
    sound = decoder.decode([decoder.new_stream()], heard[None])
    again = decoder.encoder.encode([], sound.view(len(heard), -1))
    assert torch.equal(again, heard)
