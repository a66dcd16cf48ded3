"""CSM speaks for a language model, piece by piece: its frames are those of transformers.

Now and then a running request is retracted.
"""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import soundfile as sf
import torch

from lab.cpu_graphs.attach import environment as decode_graphs
from sglang_live.clock import MonotonicClock
from sglang_live.core import AudioDelta, TranscriptDelta, TurnDone, TurnRequest
from sglang_live.errors import StageFailedError
from sglang_live.messages import TalkerInput
from sglang_live.models.codecs import END_CODE
from sglang_live.orchestrator.turn import run_turn
from sglang_live.orchestrator.turn_control import TurnControl
from sglang_live.policy.policies import OFF
from sglang_live.stages.talker.piece_speech import PieceSpeech
from sglang_live.telemetry.trace import TurnTrace
from test.csm import checkpoint as tiny
from test.engine import tiny_cascade
from test.engine.conftest import Stages, running_stages
from test.engine.gauges import total, until
from test.engine.test_graphs import decoded_sizes
from test.engine.test_qwen3_tts import text_of
from test.engine.turns import greedy_turn, user

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "40"}
ANNA_SAYS = "This is what Anna said."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("csm"))


@pytest.fixture(scope="module")
def voices(tmp_path_factory) -> Path:
    """A recording that is no whole number of frames."""
    folder = tmp_path_factory.mktemp("voices")
    rng = np.random.default_rng(3)
    sf.write(folder / "anna.wav", 0.2 * rng.standard_normal(30_000), 24_000, subtype="FLOAT")
    (folder / "anna.txt").write_text(f"{ANNA_SAYS}\n")
    return folder


class Expected:
    """The reference's frames of a response, by its pieces."""

    def __init__(self, checkpoint: Path, voices: Path):
        self.reference = tiny.Reference(checkpoint, voices)
        self._found: dict[tuple[str, str], list[np.ndarray]] = {}

    async def pieces(self, text: str, voice: str = "0") -> list[np.ndarray]:
        if (text, voice) not in self._found:
            speech = PieceSpeech(self.reference.talker, MonotonicClock())
            speech.add(TalkerInput("job", [], True, text, 1))
            found = []
            while (piece := await speech.next()) is not None:
                found.append(self.reference.piece(piece.spoken, piece.most_frames, voice))
            self._found[text, voice] = found
        return self._found[text, voice]

    async def codes(self, text: str, voice: str = "0") -> np.ndarray:
        return np.concatenate(await self.pieces(text, voice))


@pytest.fixture(scope="module")
def expected(checkpoint, voices) -> Expected:
    return Expected(checkpoint, voices)


@pytest.fixture(
    scope="module",
    params=[False, pytest.param(True, marks=pytest.mark.nightly)],
    ids=["eager", "graphs"],
)
def on_graphs(request) -> bool:
    """On graphs also with overlap."""
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stages(on_graphs, checkpoint, voices, tmp_path_factory):
    cascade = tiny_cascade.build(tmp_path_factory.mktemp("csm-cascade"), checkpoint)
    running = running_stages(
        cascade,
        tmp_path_factory.mktemp("csm-stages"),
        {"disable_overlap_schedule": not on_graphs},
        RETRACT | (decode_graphs((1, 2, 4)) if on_graphs else {}),
        policies=("urgency", "pacing", "truncate"),
        family=tiny_cascade.SPOKEN,
        voices=str(voices),
        # Prompts and retracted requests are prefilled in chunks.
        talker_args={"chunked_prefill_size": 32},
    )
    async with running as started:
        yield started


def turn_of(n_tokens: int = 4, **changes) -> TurnRequest:
    turn = greedy_turn(user("tell me more"), system="", n_tokens=n_tokens)
    return replace(turn, voice=changes.pop("voice", "0"), **changes)


async def codes(
    stages: Stages,
    turn: TurnRequest,
    text: str,
    *,
    start_s: float = 0.0,
    most_frames: int = 10_000,
) -> np.ndarray:
    """most_frames: after which the response is interrupted."""
    await asyncio.sleep(start_s)
    links = stages.links(turn.turn_id)
    frames: list[np.ndarray] = []
    async with links.talker.open(turn) as speech:
        await speech.write([0], text)
        await speech.end_text()
        async with aclosing(speech.frames()) as chunks:
            async for some in chunks:
                frames.extend(np.frombuffer(some, "<i2").reshape(-1, tiny.N_CODES))
                if len(frames) >= most_frames:
                    break
    links.close()
    return np.array([frame for frame in frames[:most_frames] if frame[0] != END_CODE])


async def test_frames_equal_those_of_transformers(stages, expected):
    text = text_of(18, n_words=9)
    wanted = await expected.codes(text)
    assert len(wanted) >= 120 and len(np.unique(wanted, axis=0)) > 100, "not trivial"
    np.testing.assert_array_equal(await codes(stages, turn_of(), text), wanted)


async def test_responses_that_share_batches_and_are_retracted_equal_transformers(
    stages, expected, on_graphs
):
    texts = [text_of(n, n_words=9) for n in (2, 5, 18, 25, 29)]
    voices = ["0", "1", "anna", "3", "anna"]
    assert sum([len(await expected.codes(*of)) for of in zip(texts, voices, strict=True)]) > 300
    n_before = await total(stages, "talker", "policy_retracted")
    spoken = zip(texts, voices, strict=True)
    heard = await asyncio.gather(
        *(
            codes(stages, turn_of(voice=voice), text, start_s=0.1 * n)
            for n, (text, voice) in enumerate(spoken)
        )
    )
    for got, text, voice in zip(heard, texts, voices, strict=True):
        np.testing.assert_array_equal(got, await expected.codes(text, voice))
    await until(stages, "talker", "policy_retracted", lambda n: n > n_before)
    await until(stages, "talker", "requests_running", lambda n: n == 0)
    if on_graphs:
        replayed, _ = decoded_sizes(stages, "talker")
        assert {1, 2} <= replayed  # larger ones depend on how busy the machine is


async def test_a_recorded_voice_is_heard_by_the_model(stages, expected):
    text = text_of(25, n_words=9)
    anna, nameless = [await expected.codes(text, voice) for voice in ("anna", "0")]
    assert anna.shape != nameless.shape or (anna != nameless).any()
    np.testing.assert_array_equal(await codes(stages, turn_of(voice="anna"), text), anna)


async def test_sampled_frames_depend_on_the_seed_alone(stages):
    async def some(seed: int) -> np.ndarray:
        turn = turn_of(temperature=None, seed=seed, voice=("0", "anna", "1")[seed])
        return await codes(stages, turn, text_of(30, n_words=20), most_frames=12)

    alone = [await some(seed) for seed in range(3)]
    together = await asyncio.gather(*(some(seed) for seed in range(3)))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)
    assert alone[0].shape != alone[2].shape or (alone[0] != alone[2]).any()
    assert max(int(one.max()) for one in alone) < tiny.CODES, "no mark is drawn"


async def test_an_unknown_voice_is_refused_and_an_interruption_frees_the_engine(stages):
    with pytest.raises(StageFailedError, match="is not one of"):
        await codes(stages, turn_of(voice="erik"), "Hello there.")
    links, turn = stages.links("cancelled"), turn_of()
    async with links.talker.open(turn) as speech, aclosing(speech.frames()) as chunks:
        await speech.write([0], text_of(18, n_words=9))
        await speech.end_text()
        await anext(chunks)
        await until(stages, "talker", "replies", lambda n: n == 1)
    links.close()
    for name in ("requests_running", "replies"):
        await until(stages, "talker", name, lambda n: n == 0)


async def test_a_turn_sounds_as_each_of_its_pieces_does_in_the_reference(stages, expected):
    links = stages.links("whole-turn")
    clock = MonotonicClock()
    turn, trace, control = turn_of(n_tokens=24), TurnTrace(clock), TurnControl(OFF, clock)
    events = [event async for event in run_turn(turn, links, trace, control)]
    links.close()
    text = "".join(event.text for event in events if isinstance(event, TranscriptDelta))
    audio = [event for event in events if isinstance(event, AudioDelta)]
    pieces = [piece for piece in await expected.pieces(text) if len(piece)]
    wave = torch.cat([expected.reference.wave(piece) for piece in pieces]).clamp(-1, 1)
    pcm = np.frombuffer(b"".join(event.pcm for event in audio), "<i2").astype(np.float32)
    assert len(pcm) == len(wave) > 15_000
    assert (torch.from_numpy(pcm) / 32767 - wave).abs().max() < 1e-4
    done = events[-1]
    assert isinstance(done, TurnDone)
    assert done.n_frames == len(wave) // 1920
