"""Qwen3-TTS speaks for a language model: its codes are those of its reference, in every batch.

The talker's pool has no room for all that the tests speak at once: requests are paused and
retracted.
"""

import asyncio
import json
import random
import shutil
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from sglang_live.clock import MonotonicClock
from sglang_live.core import AudioDelta, TranscriptDelta, TurnDone, TurnRequest
from sglang_live.errors import LiveError
from sglang_live.messages import TalkerInput
from sglang_live.models.qwen3_tts.parts import TTSTalker
from sglang_live.models.qwen3_tts.speaker import RATE_HZ
from sglang_live.models.voice_files import read_recording
from sglang_live.orchestrator.stage_links import StageLinks, make_voice
from sglang_live.orchestrator.turn import run_turn
from sglang_live.orchestrator.turn_control import TurnControl
from sglang_live.policy.policies import OFF
from sglang_live.stages.talker.response import SpokenIds
from sglang_live.telemetry.trace import TurnTrace
from test.engine import tiny_cascade
from test.engine.conftest import Stages, running_stages
from test.engine.gauges import total, until
from test.engine.losses import lost_turns_are_as_others
from test.engine.turns import greedy_turn, user
from test.qwen3_tts import checkpoint as tiny
from test.qwen3_tts.reference import Reference

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

# Room for two whole responses, or for several at their beginning.
POOL_TOKENS = 250
# Pacing pauses streams of users who interrupt; others only if the pool is full.
DATA = Path(__file__).parents[1] / "data" / "audio"
# By recording, the embedding that qwen_tts 0.1.1 computes with the tiny weights.
CLONED = json.loads((Path(__file__).parents[1] / "qwen3_tts" / "speaker.json").read_text())
WORDS = ("river", "bridge", "tide", "boats", "evening", "lighthouse", "children", "walk", "sea")


def text_of(seed: int, n_words: int = 40) -> str:
    """Sentences whose speech has more than a hundred frames."""
    rng = random.Random(seed)
    words = [rng.choice(WORDS) for _ in range(n_words)]
    return " ".join(f"{word}." if n % 9 == 8 else word for n, word in enumerate(words))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("qwen3-tts"), ends=True, clones=True)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("voices")
    for name in CLONED:
        shutil.copy(DATA / name, folder)
    return folder


class Expected:
    """The reference's codes of a text."""

    def __init__(self, checkpoint: Path):
        self.reference, self._talker = Reference(checkpoint), TTSTalker(checkpoint)
        self._known: dict[tuple[str, str], np.ndarray] = {}
        self._cloned = {
            Path(name).stem: torch.tensor(embedding) for name, embedding in CLONED.items()
        }

    def ids(self, text: str) -> list[int]:
        return SpokenIds(self._talker.reads).add(TalkerInput("job", [], True, text))

    def codes(self, text: str, voice: str = "vivian") -> np.ndarray:
        if (text, voice) not in self._known:
            ids = self.ids(text)
            speaker = self._cloned.get(voice, voice)
            codes = self.reference.speak(self._talker._role, ids, speaker, 1000)
            assert len(codes) == len(ids) + 1, "the end follows the text"
            self._known[text, voice] = np.array(codes)
        return self._known[text, voice]


@pytest.fixture(scope="module")
def expected(checkpoint) -> Expected:
    return Expected(checkpoint)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stages(checkpoint, recordings, tmp_path_factory):
    cascade = tiny_cascade.build(tmp_path_factory.mktemp("spoken-cascade"), checkpoint)
    running = running_stages(
        cascade,
        tmp_path_factory.mktemp("spoken-stages"),
        {"max_total_tokens": POOL_TOKENS, "max_running_requests": 8},
        # Without it, SGLang reserves room for 4096 tokens per response, and admits one at a time.
        {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8"},
        policies=("urgency", "pacing", "truncate"),
        family=tiny_cascade.SPOKEN,
        voices=str(recordings),
    )
    with pytest.MonkeyPatch.context() as patch:
        # A stage that is slower than its speech does not pace, and a loaded machine is slow.
        patch.setattr(TTSTalker, "step_s", 0.5)
        async with running as started:
            yield started


def turn_of(n_tokens: int = 4, **changes) -> TurnRequest:
    turn = greedy_turn(user("tell me more"), system="", n_tokens=n_tokens)
    return replace(turn, **({"voice": "vivian"} | changes))


async def codes(
    stages: Stages,
    turn: TurnRequest,
    text: str,
    *,
    start_s: float = 0.0,
    part_every_s: float = 0.0,
    listening: asyncio.Event | None = None,
    writing: asyncio.Event | None = None,
) -> np.ndarray:
    """The codes of a text that comes in parts.

    Its listener hears nothing until `listening`, and after a few words no text comes until
    `writing`.
    """
    await asyncio.sleep(start_s)
    links = stages.links(turn.turn_id)
    frames: list[np.ndarray] = []
    async with links.talker.open(turn) as speech:
        tasks = [
            asyncio.create_task(_write(speech, text, part_every_s, writing)),
            asyncio.create_task(_listen(speech, listening)),
        ]
        try:
            async with aclosing(speech.frames()) as chunks:
                async for some in chunks:
                    frames.extend(np.frombuffer(some, "<i2").reshape(-1, tiny.GROUPS))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert speech.ended
    links.close()
    return np.stack(frames)


async def _write(
    speech, text: str, part_every_s: float, writing: asyncio.Event | None = None
) -> None:
    if writing is not None:
        await speech.write([0], text[:80])
        await writing.wait()
        text = text[80:]
    n = 7 if part_every_s else len(text)
    for begin in range(0, len(text), n):
        await speech.write([0], text[begin : begin + n])
        await asyncio.sleep(part_every_s)
    await speech.end_text()


async def _listen(speech, listening: asyncio.Event | None) -> None:
    while True:
        is_heard = listening is None or listening.is_set()
        speech.report(1000.0 if is_heard else 0.0, False)
        await asyncio.sleep(0.02)


async def test_codes_equal_those_of_the_reference_up_to_its_end(stages, expected):
    wanted = expected.codes(text_of(0))
    assert len(wanted) > 100 and len(np.unique(wanted)) > 100, "the case must not be trivial"
    np.testing.assert_array_equal(await codes(stages, turn_of(), text_of(0)), wanted)


async def test_a_voice_of_a_dialect_equals_the_reference(stages, expected):
    text = text_of(1, n_words=8)
    wanted = expected.codes(text, "eric")
    np.testing.assert_array_equal(await codes(stages, turn_of(voice="eric"), text), wanted)
    assert wanted.shape != (other := expected.codes(text)).shape or (wanted != other).any()


async def test_cloned_voices_equal_the_reference_with_their_embeddings(
    stages, expected, recordings
):
    """Those of the talker's start, and those that a turn brings along."""
    text, voices = text_of(3, n_words=20), [Path(name).stem for name in CLONED]
    talker, turns = stages.replica("talker"), [turn_of(voice=voice) for voice in voices]
    for name, embedding in CLONED.items():
        speaker = await make_voice(talker, read_recording(recordings / name, RATE_HZ))
        np.testing.assert_allclose(np.frombuffer(speaker, "<f4"), embedding, atol=2e-5)
        turns.append(turn_of(voice="voice_1", speaker=speaker))
    spoken = await asyncio.gather(*(codes(stages, turn, text) for turn in turns))
    wanted = [expected.codes(text, voice) for voice in ("vivian", *voices)]
    for got, codes_of_voice in zip(spoken, wanted[1:] * 2, strict=True):
        np.testing.assert_array_equal(got, codes_of_voice)
    assert len({found.tobytes() for found in wanted}) == 3, "each voice has codes of its own"
    for speaker, message in ((b"", "voice 'voice_1' is not one of"), (bytes(8), "another model")):
        with pytest.raises(LiveError, match=message):
            await codes(stages, turn_of(voice="voice_1", speaker=speaker), text)


async def test_streams_that_start_and_starve_at_different_times_equal_the_reference(
    stages, expected
):
    texts = [text_of(n) for n in range(5)]
    heard = await asyncio.gather(
        *(
            codes(stages, turn_of(), text, start_s=0.1 * n, part_every_s=0.02 * n)
            for n, text in enumerate(texts)
        )
    )
    for got, text in zip(heard, texts, strict=True):
        np.testing.assert_array_equal(got, expected.codes(text))


async def test_paused_and_retracted_streams_continue_as_in_the_reference(stages, expected):
    texts = [text_of(n) for n in range(6)]
    n_before = await total(stages, "talker", "policy_paused_retracted")
    heard = asyncio.Event()
    waiting = [asyncio.create_task(codes(stages, turn_of(), t, listening=heard)) for t in texts[:4]]
    await until(stages, "talker", "policy_paused_now", lambda n: n == 4)
    running = await asyncio.gather(*(codes(stages, turn_of(), t) for t in texts[4:]))
    await until(stages, "talker", "policy_paused_retracted", lambda n: n > n_before)
    heard.set()
    spoken = [*await asyncio.gather(*waiting), *running]
    for got, text in zip(spoken, texts, strict=True):
        np.testing.assert_array_equal(got, expected.codes(text))
    await until(stages, "talker", "requests_running", lambda n: n == 0)


async def test_streams_that_wait_for_text_are_retracted_and_continue_as_in_the_reference(
    stages, expected
):
    """The code 0 that waits for its text is not prefilled without it."""
    texts = [text_of(n) for n in range(6)]
    n_before = await total(stages, "talker", "policy_paused_retracted")
    written = asyncio.Event()
    waiting = [asyncio.create_task(codes(stages, turn_of(), t, writing=written)) for t in texts[:4]]
    await until(stages, "talker", "policy_paused_now", lambda n: n == 4)
    running = await asyncio.gather(*(codes(stages, turn_of(), t) for t in texts[4:]))
    await until(stages, "talker", "policy_paused_retracted", lambda n: n > n_before)
    written.set()
    spoken = [*await asyncio.gather(*waiting), *running]
    for got, text in zip(spoken, texts, strict=True):
        np.testing.assert_array_equal(got, expected.codes(text))


async def test_sampled_codes_depend_on_the_seed_alone(stages):
    texts = [text_of(n, n_words=12) for n in range(4)]
    turns = [turn_of(temperature=None, seed=70 + n) for n in range(4)]
    jobs = list(zip(turns, texts, strict=True))
    alone = [await codes(stages, replace(turn, turn_id=f"{turn.turn_id}-a"), t) for turn, t in jobs]
    together = await asyncio.gather(*(codes(stages, turn, text) for turn, text in jobs))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)
    other_seed = await codes(stages, turn_of(temperature=None, seed=1), texts[0])
    assert (other_seed[:9] != alone[0][:9]).any()


async def test_a_turn_of_any_language_model_is_spoken_in_the_references_sound(stages, expected):
    links = stages.links("whole-turn")
    assert isinstance(links, StageLinks)
    clock = MonotonicClock()
    turn, trace, control = turn_of(n_tokens=24), TurnTrace(clock), TurnControl(OFF, clock)
    events = [event async for event in run_turn(turn, links, trace, control)]
    links.close()
    text = "".join(event.text for event in events if isinstance(event, TranscriptDelta))
    pcm = b"".join(event.pcm for event in events if isinstance(event, AudioDelta))
    wanted = expected.codes(text)
    done = events[-1]
    assert isinstance(done, TurnDone) and done.spoken
    assert len(wanted) > 3 and done.n_frames == len(wanted)
    wave = expected.reference.codec.decode(torch.from_numpy(wanted))
    heard = torch.from_numpy(np.frombuffer(pcm, "<i2").astype(np.float32)) / 32767
    assert heard.shape == wave.shape
    assert (heard - wave).abs().max() < 1e-4


async def test_a_job_that_is_lost_goes_on_with_the_same_speech(stages):
    deaths = [("talker", AudioDelta, n) for n in (1, 4)] + [("vocoder", AudioDelta, 3)]
    await lost_turns_are_as_others(stages, turn_of(n_tokens=24, turn_id="lost"), deaths)
