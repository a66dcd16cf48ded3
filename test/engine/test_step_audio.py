"""Step-Audio 2 mini in its thinker stage, on tiny random weights: it hears through its encoder, its
ids of text and speech equal those of transformers, and after an interruption it goes on behind what
was heard of both."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoTokenizer

from lab.poison import POISON
from sglang_live.core import AudioPart, HistoryItem, TextPart
from sglang_live.models.prompt import Clip, Markup
from sglang_live.models.step_audio.family import AUDIO_PLACE, StepAudioSpec
from sglang_live.models.step_audio.hearing import LogMel, n_tokens
from sglang_live.models.step_audio.parts import StepAudioPrompt
from test.engine.conftest import Stages, running_stages
from test.engine.test_glm4_voice import POLICIES, written
from test.engine.turns import greedy_turn, reply_of, think, user
from test.step_audio import checkpoint as tiny
from test.step_audio import reference
from test.unit.models.test_glm4_voice import tones

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

FAMILY = "sglang_live.models.step_audio.family"
SYSTEM = "Be kind."
N_IDS = 40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("step") / "checkpoint")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stages(checkpoint, tmp_path_factory):
    running = running_stages(
        checkpoint,
        tmp_path_factory.mktemp("step-stages"),
        # A clip of two seconds is prefilled in three pieces.
        engine_args={"chunked_prefill_size": 16},
        policies=POLICIES,
        thinker_environment=POISON,
        names=("thinker",),
        family=FAMILY,
    )
    async with running as started:
        yield started


class Model:
    """The published model, as transformers and the restated encoder have it."""

    def __init__(self, path: Path, instructions: str = SYSTEM):
        self._instructions = instructions
        tokenizer = AutoTokenizer.from_pretrained(path, config=tiny.language_config())
        self.prompt = StepAudioPrompt(StepAudioSpec.load(path), tokenizer)
        self._model = reference.Model(path)
        self._mels = LogMel(tiny.ENCODER["n_mels"])

    def ids(self, *history: HistoryItem) -> list[int]:
        ids: list[int] = []
        pieces = self.prompt.header(self._instructions)
        for item in history:
            pieces += self.prompt.item(item)
        for piece in [*pieces, *self.prompt.open_response()]:
            match piece:
                case Markup():
                    ids += self.prompt.markup_ids(piece.text)
                case Clip():
                    n = n_tokens(self._mels(_samples(piece.medium)).shape[1])
                    text = piece.markup.replace(AUDIO_PLACE, AUDIO_PLACE * n)
                    ids += self.prompt.markup_ids(text)
                case _:
                    ids += piece.token_ids
        return ids

    def response(self, *history: HistoryItem, n: int = N_IDS) -> list[int]:
        heard = [medium.pcm for item in history for medium in self.prompt.media(item)]
        return self._model.greedy(self.ids(*history), heard, n)


def _samples(clip: AudioPart) -> torch.Tensor:
    return torch.tensor(clip.pcm / np.float32(32_768))


@pytest.fixture(scope="module")
def model(checkpoint) -> Model:
    return Model(checkpoint)


async def test_ids_of_both_kinds_equal_the_references_in_any_batch(stages: Stages, model: Model):
    said = [
        user(tones(2.5)),
        user("tell me of the little list"),
        user("the end", tones(0.7), "and then"),
        user(tones(26.0)),
    ]
    turns = [greedy_turn(one, system=SYSTEM, n_tokens=N_IDS) for one in said]
    found = await asyncio.gather(*(written(stages, turn) for turn in turns))
    for item, (done, parts) in zip(said, found, strict=True):
        assert done.n_prompt == len(model.ids(item))
        assert done.ids == model.response(item)
        codes = [token - tiny.FIRST_CODE for token in done.ids if token >= tiny.FIRST_CODE]
        assert 5 < len(codes) < N_IDS - 5
        assert np.frombuffer(b"".join(part.codes for part in parts), "<i2").tolist() == codes
        assert "".join(part.text for part in parts) == done.text
        text = [token for token in done.ids if token < tiny.FIRST_CODE]
        assert done.text == model.prompt.text_of(text).rstrip("\ufffd")
    assert found[0][0].n_audio == 31 and found[1][0].n_audio == 0


async def test_the_prompt_that_two_share_is_found_and_changes_nothing(stages: Stages, model: Model):
    item = user(tones(1.5))
    expected = model.response(item, n=12)
    for _ in range(2):
        done, _ = await written(stages, greedy_turn(item, system=SYSTEM, n_tokens=12))
        assert done.ids == expected
    assert done.n_cached > 0


async def test_three_turns_with_an_interruption_know_what_was_heard(stages: Stages, model: Model):
    links = stages.links("talk")
    first, clip = user(tones(2.0)), user(tones(1.3))
    turn = greedy_turn(first, system=SYSTEM, n_tokens=600)
    done = await think(links, turn, interrupt_after=30)
    assert done.finish == "interrupted" and 30 <= len(done.ids) < 600
    assert done.ids == model.response(first, n=len(done.ids))
    heard = HistoryItem(
        key="heard", role="assistant", parts=(TextPart("x"),), token_ids=tuple(done.ids[:17])
    )
    again = greedy_turn(first, heard, clip, system=SYSTEM, n_tokens=N_IDS)
    after = await think(links, again)
    assert not after.rebuilt and after.n_prompt == len(model.ids(first, heard, clip))
    assert after.ids == model.response(first, heard, clip)
    n_kept = len(model.ids(first)) + 17
    assert n_kept - 1 <= after.n_cached <= n_kept
    last = user("and the end")
    third = greedy_turn(*again.history, reply_of(again, after), last, system=SYSTEM, n_tokens=8)
    done = await think(links, third)
    assert not done.rebuilt
    assert done.ids == model.response(*third.history, n=8)
    links.close()
