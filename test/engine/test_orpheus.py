"""Orpheus speaks for a language model, piece by piece: its codes are those of transformers.

SGLang's own class serves it. Now and then a running request is retracted.
"""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from sglang_live.clock import MonotonicClock
from sglang_live.core import AudioDelta, TranscriptDelta, TurnDone, TurnRequest
from sglang_live.errors import StageFailedError
from sglang_live.messages import TalkerInput
from sglang_live.models.codecs import END_CODE
from sglang_live.orchestrator.stage_links import StageLinks
from sglang_live.orchestrator.turn import run_turn
from sglang_live.orchestrator.turn_control import TurnControl
from sglang_live.policy.policies import OFF
from sglang_live.stages.talker.piece_speech import PieceSpeech
from sglang_live.telemetry.trace import TurnTrace
from test.engine import tiny_cascade
from test.engine.conftest import Stages, running_stages
from test.engine.gauges import total, until
from test.engine.losses import lost_turns_are_as_others
from test.engine.test_qwen3_tts import text_of
from test.engine.turns import greedy_turn, user
from test.orpheus import checkpoint as tiny

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("orpheus"))


class Expected:
    """The reference's codes of a response, by its pieces."""

    def __init__(self, checkpoint: Path):
        self.reference = tiny.Reference(checkpoint)
        self._found: dict[tuple[str, str], list[np.ndarray]] = {}

    async def pieces(self, text: str, voice: str = "tara") -> list[np.ndarray]:
        if (text, voice) not in self._found:
            speech = PieceSpeech(self.reference.talker, MonotonicClock())
            speech.add(TalkerInput("job", [], True, text, 1))
            found = []
            while (piece := await speech.next()) is not None:
                found.append(self.reference.codes(piece.spoken, piece.most_frames, voice))
            self._found[text, voice] = found
        return self._found[text, voice]

    async def codes(self, text: str, voice: str = "tara") -> np.ndarray:
        return np.concatenate(await self.pieces(text, voice))


@pytest.fixture(scope="module")
def expected(checkpoint) -> Expected:
    return Expected(checkpoint)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stages(checkpoint, tmp_path_factory):
    cascade = tiny_cascade.build(tmp_path_factory.mktemp("pieces-cascade"), checkpoint)
    running = running_stages(
        cascade,
        tmp_path_factory.mktemp("pieces-stages"),
        {"disable_overlap_schedule": True},
        {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "40"},
        policies=("urgency", "pacing", "truncate"),
        family=tiny_cascade.SPOKEN,
    )
    async with running as started:
        yield started


def turn_of(n_tokens: int = 4, **changes) -> TurnRequest:
    turn = greedy_turn(user("tell me more"), system="", n_tokens=n_tokens)
    return replace(turn, voice=changes.pop("voice", "tara"), **changes)


async def codes(
    stages: Stages,
    turn: TurnRequest,
    text: str,
    *,
    start_s: float = 0.0,
    part_every_s: float = 0.0,
    most_frames: int = 10_000,
) -> np.ndarray:
    """The codes of a text that comes in parts.

    most_frames: after which the response is interrupted.
    """
    await asyncio.sleep(start_s)
    links = stages.links(turn.turn_id)
    frames: list[np.ndarray] = []
    async with links.talker.open(turn) as speech:
        writing = asyncio.create_task(_write(speech, text, part_every_s))
        try:
            async with aclosing(speech.frames()) as chunks:
                async for some in chunks:
                    frames.extend(np.frombuffer(some, "<i2").reshape(-1, 7))
                    if len(frames) >= most_frames:
                        break
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
    links.close()
    return np.array([frame for frame in frames[:most_frames] if frame[0] != END_CODE])


async def _write(speech, text: str, part_every_s: float) -> None:
    n = 7 if part_every_s else len(text)
    for begin in range(0, len(text), n):
        await speech.write([0], text[begin : begin + n])
        await asyncio.sleep(part_every_s)
    await speech.end_text()


@pytest.mark.nightly
async def test_codes_equal_those_of_transformers(stages, expected):
    wanted = await expected.codes(text_of(1, n_words=8))
    assert len(wanted) > 100, "the case must not be trivial"
    found = await codes(stages, turn_of(), text_of(1, n_words=8))
    np.testing.assert_array_equal(found, wanted)


async def test_a_voice_has_codes_of_its_own(stages, expected):
    leo, tara = (expected.reference.codes("We go home.", 8, voice) for voice in ("leo", "tara"))
    assert leo.shape != tara.shape or (leo != tara).any()
    found = await codes(stages, turn_of(voice="leo"), "We go home.", most_frames=8)
    np.testing.assert_array_equal(found[: len(leo)], leo)


async def test_responses_that_share_batches_and_are_retracted_equal_transformers(stages, expected):
    texts = [text_of(0, n_words=20), text_of(11, n_words=12), text_of(20, n_words=12)]
    lengths = [[len(piece) for piece in await expected.pieces(text)] for text in texts]
    assert sum(map(sum, lengths)) > 100 and len(lengths[0]) > 1, "the case must not be trivial"
    n_before = await total(stages, "talker", "policy_retracted")
    heard = await asyncio.gather(
        *(
            codes(stages, turn_of(), text, start_s=0.1 * n, part_every_s=0.01 * n)
            for n, text in enumerate(texts)
        )
    )
    for got, text in zip(heard, texts, strict=True):
        np.testing.assert_array_equal(got, await expected.codes(text))
    await until(stages, "talker", "policy_retracted", lambda n: n > n_before)
    await until(stages, "talker", "requests_running", lambda n: n == 0)


async def test_sampled_codes_depend_on_the_seed_alone(stages):
    async def some(seed: int) -> np.ndarray:
        turn = turn_of(temperature=None, seed=seed)
        return await codes(stages, turn, text_of(30, n_words=20), most_frames=6)

    alone = [await some(seed) for seed in range(3)]
    together = await asyncio.gather(*(some(seed) for seed in range(3)))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)
    assert alone[0].shape != alone[1].shape or (alone[0] != alone[1]).any()


async def test_an_unknown_voice_is_refused_and_an_interruption_frees_the_engine(stages):
    with pytest.raises(StageFailedError, match="is not one of"):
        await codes(stages, turn_of(voice="erik"), "Hello there.")
    links, turn = stages.links("cancelled"), turn_of()
    async with links.talker.open(turn) as speech, aclosing(speech.frames()) as chunks:
        await speech.write([0], text_of(0))
        await anext(chunks)
        await until(stages, "talker", "replies", lambda n: n == 1)
    links.close()
    for name in ("requests_running", "replies"):
        await until(stages, "talker", name, lambda n: n == 0)


async def test_a_turn_sounds_as_each_of_its_pieces_does_in_the_reference(stages, expected):
    links = stages.links("whole-turn")
    assert isinstance(links, StageLinks)
    clock = MonotonicClock()
    turn, trace, control = turn_of(n_tokens=24), TurnTrace(clock), TurnControl(OFF, clock)
    events = [event async for event in run_turn(turn, links, trace, control)]
    links.close()
    text = "".join(event.text for event in events if isinstance(event, TranscriptDelta))
    audio = [event for event in events if isinstance(event, AudioDelta)]
    pieces = [piece for piece in await expected.pieces(text) if len(piece)]
    wave = torch.cat([expected.reference.wave(piece) for piece in pieces])
    pcm = np.frombuffer(b"".join(event.pcm for event in audio), "<i2").astype(np.float32)
    assert len(pcm) == len(wave) > 24_000
    assert (torch.from_numpy(pcm) / 32767 - wave).abs().max() < 2e-4
    marks = [mark for event in audio for mark in event.spoken]
    done = events[-1]
    assert isinstance(done, TurnDone)
    assert done.n_frames == round(len(wave) / 24_000 / 0.08)
    assert max(n_tokens for n_tokens, _ in marks) == 24
    assert max(at_s for _, at_s in marks) == pytest.approx(len(wave) / 24_000)


async def test_a_job_that_is_lost_goes_on_with_the_same_speech(stages):
    deaths = [("talker", AudioDelta, n) for n in (1, 12)] + [("vocoder", AudioDelta, 5)]
    await lost_turns_are_as_others(stages, turn_of(n_tokens=24, turn_id="lost"), deaths)
