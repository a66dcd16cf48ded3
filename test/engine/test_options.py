"""The probabilities of options are those of transformers' own model, among the options."""

from dataclasses import replace

import pytest
import torch

from sglang_live.errors import OptionsAlikeError, StageFailedError
from test.engine.reference import AUDIO, Reference, chat
from test.engine.turns import greedy_turn, think, user

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

OPTIONS = ("A", "B", "C", "the river and the bridge")


@torch.no_grad()
def expected(reference: Reference, text: str, clips: list) -> list[float]:
    inputs = reference.inputs(chat("Be brief.", ("user", text)), clips)
    logits = reference.model.thinker(**inputs).logits[0, -1].double()
    tokenizer = reference.processor.tokenizer
    ids = [tokenizer.encode(one, add_special_tokens=False) for one in OPTIONS]
    return torch.softmax(logits[[tokens[0] for tokens in ids]], 0).tolist()


@pytest.mark.parametrize("name", ["", "chooses"], ids=["stateless", "session"])
async def test_shares_match_the_reference(stages, reference, speech, name):
    clip = speech[:32_000]
    for asked, text, clips in (
        (user("which of them?"), "which of them?", []),
        (user(clip), AUDIO, [clip]),
    ):
        links = stages.links(name)
        turn = replace(greedy_turn(asked, system="Be brief.", n_tokens=8), options=OPTIONS)
        done = await think(links, turn)
        assert done.shares == pytest.approx(expected(reference, text, clips), abs=1e-4)
        assert sum(done.shares) == pytest.approx(1, abs=1e-12)
        assert len(done.ids) <= 1
        links.close()


async def test_options_that_begin_alike_or_are_empty_are_refused(stages):
    for options in (("A", "A"), ("the river", "the bridge"), ("A", "")):
        turn = greedy_turn(user("hello"), system="", n_tokens=8)
        with pytest.raises(StageFailedError) as failed:
            await think(stages.links(""), replace(turn, options=options))
        assert failed.value.reason == OptionsAlikeError.code
