"""The features of the endpoint model are those of its training."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import soundfile
from transformers import WhisperFeatureExtractor

from sglang_live.interaction.endpoint import (
    MODEL_SAMPLES,
    EndpointThreads,
    SmartTurnModel,
    installed_model_path,
    log_mel,
)

AUDIO = Path(__file__).parents[2] / "data" / "audio"
SPEECH = AUDIO / "sp_librivox_0880.flac"


@pytest.mark.parametrize("n_samples", [0, 1, 16_000, MODEL_SAMPLES])
def test_features_are_those_of_whisper(n_samples):
    pcm, _ = soundfile.read(SPEECH, dtype="int16")
    pcm = np.resize(pcm, n_samples)
    wave = np.zeros(MODEL_SAMPLES, np.float32)
    wave[MODEL_SAMPLES - n_samples :] = pcm.astype(np.float32) / 32768
    extractor = WhisperFeatureExtractor(chunk_length=8)
    theirs = extractor(
        wave, sampling_rate=16_000, return_tensors="np", do_normalize=True
    ).input_features[0]
    ours = log_mel(pcm)
    assert ours.shape == theirs.shape == (80, 800)
    np.testing.assert_allclose(ours, theirs, atol=2e-4)


def test_a_finished_sentence_sounds_complete_and_its_parts_do_not():
    model = SmartTurnModel(installed_model_path())
    pcm, rate_hz = soundfile.read(AUDIO / "sp_jfk.flac", dtype="int16")
    assert rate_hz == 16_000
    loud = np.flatnonzero(np.abs(pcm.astype(int)) > 500)
    whole, pause = pcm[loud[0] : loud[-1]], np.zeros(3200, np.int16)
    assert model.completeness(np.concatenate([whole, pause])) > 0.5
    for share in (0.45, 0.6, 0.75):
        part = whole[: round(share * len(whole))]
        assert model.completeness(np.concatenate([part, pause])) < 0.3


async def test_where_cores_are_short_the_event_loop_goes_first():
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    class FakeModel:
        def completeness(self, pcm: np.ndarray) -> float:
            return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    threads = EndpointThreads(FakeModel())
    try:
        assert await threads.score(np.zeros(1, np.int16), lambda: True) == min(own + 10, 19)
    finally:
        threads.close()
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own
