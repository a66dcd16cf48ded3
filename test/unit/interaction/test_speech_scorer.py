"""Many callers, one network: each gets what it would get alone."""

import asyncio
import threading
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import soundfile

from sglang_live.interaction.silero import (
    CONTEXT_SAMPLES,
    STATE_SHAPE,
    WINDOW_SAMPLES,
    SileroModel,
    bundled_model_path,
)
from sglang_live.interaction.speech_scorer import SpeechScorer

AUDIO = Path(__file__).parents[2] / "data" / "audio"
_PATIENCE_S = 10.0


class CountingModel:
    """Each window's score says how often its caller was scored before; gate: lets it work."""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.batches: list[int] = []
        self.error: Exception | None = None

    def score(self, windows, states):
        assert self.gate.wait(_PATIENCE_S)
        if self.error:
            raise self.error
        self.batches.append(len(windows))
        return states[0, :, 0].copy(), states + 1


@pytest.fixture
def model():
    return CountingModel()


@pytest.fixture
def scorer(model):
    scorer = SpeechScorer(model)
    yield scorer
    model.gate.set()
    scorer.close()


def windows(n: int) -> np.ndarray:
    return np.zeros((n, CONTEXT_SAMPLES + WINDOW_SAMPLES), np.float32)


START = np.zeros(STATE_SHAPE, np.float32)


async def test_a_callers_windows_are_scored_in_order_and_its_state_goes_on(scorer):
    scores, state = await scorer.score(windows(3), START)
    assert scores.tolist() == [0, 1, 2]
    more, _ = await scorer.score(windows(2), state)
    assert more.tolist() == [3, 4]


async def test_who_comes_while_the_network_works_shares_the_next_batch(scorer, model):
    model.gate.clear()
    asks = [asyncio.create_task(scorer.score(windows(n), START)) for n in (1, 3, 2, 1)]
    await asyncio.sleep(0.05)
    model.gate.set()
    scores = [(await ask)[0].tolist() for ask in asks]
    assert scores == [[0], [0, 1, 2], [0, 1], [0]]
    # The first may have been alone; no window had a batch of its own but those.
    assert sum(model.batches) == 7
    assert len(model.batches) <= 4


async def test_a_failure_is_told_to_those_it_concerns_and_the_next_are_served(scorer, model):
    model.error = ValueError("broken")
    with pytest.raises(ValueError, match="broken"):
        await scorer.score(windows(1), START)
    model.error = None
    assert (await scorer.score(windows(1), START))[0].tolist() == [0]


async def test_a_caller_who_leaves_disturbs_nobody(scorer, model):
    model.gate.clear()
    leaving, staying = (asyncio.create_task(scorer.score(windows(2), START)) for _ in range(2))
    await asyncio.sleep(0.05)
    leaving.cancel()
    model.gate.set()
    assert (await staying)[0].tolist() == [0, 1]


def test_it_ends_and_may_begin_again(scorer):
    for _ in range(2):
        scores, _ = asyncio.run(scorer.score(windows(1), START))
        assert scores.tolist() == [0]
        scorer.close()
    assert "speech scorer" not in {thread.name for thread in threading.enumerate()}


def test_a_batch_scores_as_the_published_graph_of_one_caller():
    """Against the graph for one caller's run of windows, on four different recordings."""
    pcm = [soundfile.read(path, dtype="float32")[0] for path in sorted(AUDIO.glob("*.flac"))[:4]]
    n = min(len(clip) for clip in pcm) // WINDOW_SAMPLES
    runs = np.zeros((4, n, CONTEXT_SAMPLES + WINDOW_SAMPLES), np.float32)
    for clip, run in zip(pcm, runs, strict=True):
        with_context = np.concatenate((np.zeros(CONTEXT_SAMPLES, np.float32), clip))
        for i in range(n):
            at = i * WINDOW_SAMPLES
            run[i] = with_context[at : at + CONTEXT_SAMPLES + WINDOW_SAMPLES]
    silero, states, together = SileroModel(), np.zeros((2, 4, 128), np.float32), []
    for i in range(n):
        scores, states = silero.score(runs[:, i], states)
        together.append(scores)
    path = bundled_model_path().with_name("silero_vad_16k_sequence.onnx")
    alone = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    zeros = np.zeros((1, 1, 128), np.float32)
    for i, run in enumerate(runs):
        (expected,) = alone.run(("speech_probs",), {"input": run, "h": zeros, "c": zeros})
        assert np.abs(np.array(together)[:, i] - expected).max() < 1e-4
