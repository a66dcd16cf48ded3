"""The rearranged network scores as the published graph does, for one user and for many."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_live.interaction.silero import (
    CONTEXT_SAMPLES,
    WINDOW_SAMPLES,
    SileroModel,
    bundled_model_path,
)

CLIPS = sorted((Path(__file__).parents[3] / "benchmark/workloads/clips").glob("*.flac"))
# Of float32 sums in another order; what is decided by these numbers has thresholds of 0.35 and 0.5.
CLOSE = 1e-4


def windows_of(pcm: np.ndarray) -> np.ndarray:
    audio = np.concatenate((np.zeros(CONTEXT_SAMPLES, np.float32), pcm.astype(np.float32) / 32768))
    starts = range(0, len(audio) - CONTEXT_SAMPLES - WINDOW_SAMPLES + 1, WINDOW_SAMPLES)
    return np.stack([audio[at : at + CONTEXT_SAMPLES + WINDOW_SAMPLES] for at in starts])


@pytest.fixture(scope="module")
def network():
    return SileroModel()


@pytest.fixture(scope="module")
def spoken():
    return [windows_of(soundfile.read(path, dtype="int16")[0]) for path in CLIPS[:6]]


@pytest.fixture(scope="module")
def published():
    return onnxruntime.InferenceSession(bundled_model_path(), providers=["CPUExecutionProvider"])


def test_scores_equal_those_of_the_published_graph(network, spoken, published):
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 3000, 16_000).clip(-32768, 32767).astype(np.int16)
    zeros = np.zeros((1, 1, 128), np.float32)
    for windows in (*spoken, windows_of(noise), windows_of(np.zeros(16_000, np.int16))):
        wanted, h, c = published.run(
            ("speech_probs", "hn", "cn"), {"input": windows, "h": zeros, "c": zeros}
        )
        ((probabilities, state),) = network.score([(windows, network.initial_state())])
        np.testing.assert_allclose(probabilities, wanted, atol=CLOSE, rtol=CLOSE)
        np.testing.assert_allclose(state.h, h[0, 0], atol=CLOSE, rtol=CLOSE)
        np.testing.assert_allclose(state.c, c[0, 0], atol=CLOSE, rtol=CLOSE)
    assert max(network.score([(spoken[0], network.initial_state())])[0][0]) > 0.9


@settings(max_examples=30)
@given(data=st.data())
def test_users_scored_together_get_the_scores_they_would_get_alone(network, spoken, data):
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))
    asked, alone = [], []
    for i, n in enumerate(lengths):
        windows = spoken[i % len(spoken)]
        begin = data.draw(st.integers(0, 20))
        ((_, state),) = network.score([(windows[: begin + 1], network.initial_state())])
        asked.append((windows[begin + 1 : begin + 1 + n], state))
        alone += network.score(asked[-1:])
    for (probabilities, state), (wanted, wanted_state) in zip(
        network.score(asked), alone, strict=True
    ):
        np.testing.assert_allclose(probabilities, wanted, atol=CLOSE, rtol=CLOSE)
        np.testing.assert_allclose(state.h, wanted_state.h, atol=CLOSE, rtol=CLOSE)
        np.testing.assert_allclose(state.c, wanted_state.c, atol=CLOSE, rtol=CLOSE)


def test_the_input_is_not_changed(network, spoken):
    state = network.initial_state()
    windows = spoken[0][:5].copy()
    network.score([(windows, state)])
    np.testing.assert_array_equal(windows, spoken[0][:5])
    assert not state.h.any() and not state.c.any()
