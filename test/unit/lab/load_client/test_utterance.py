import base64
import json

import numpy as np
import pytest

from lab.load_client.utterance import Utterance, frames_before_speech, silence_message
from sglang_live.client import clip

LOUD = np.full(clip.FRAME_BYTES // 2, 8000, "<i2").tobytes()
QUIET = bytes(clip.FRAME_BYTES)


def tone(duration_s: float, amplitude: int) -> bytes:
    t = np.arange(round(duration_s * clip.SAMPLE_RATE_HZ)) / clip.SAMPLE_RATE_HZ
    return (amplitude * np.sin(2 * np.pi * 440 * t)).astype("<i2").tobytes()


def audio_of(message: str) -> bytes:
    return base64.b64decode(json.loads(message)["audio"])


def test_speech_begins_and_ends_with_its_loud_frames():
    utterance = Utterance.of(QUIET * 2 + LOUD * 3 + QUIET)
    assert (utterance.onset, utterance.end) == (3, 5)
    assert len(utterance.messages) == 6
    assert b"".join(map(audio_of, utterance.messages)) == QUIET * 2 + LOUD * 3 + QUIET


def test_longer_messages_hold_the_same_audio():
    utterance = Utterance.of(QUIET * 2 + LOUD * 3, frames_per_message=2)
    assert [len(audio_of(m)) for m in utterance.messages] == [2 * clip.FRAME_BYTES] * 3
    assert (utterance.onset, utterance.end) == (2, 3)
    assert audio_of(silence_message(2)) == QUIET * 2


def test_audio_without_samples_is_refused():
    with pytest.raises(ValueError, match="no samples"):
        Utterance.of(b"")


@pytest.mark.parametrize("room_amplitude", [0, 20, 300, 1500])
def test_speech_begins_where_it_exceeds_the_room_noise(room_amplitude):
    rng = np.random.default_rng(0)
    samples = np.frombuffer(bytes(10 * clip.FRAME_BYTES) + tone(0.4, 16000), "<i2")
    noise = rng.normal(0, room_amplitude, len(samples))
    noisy = (samples + noise).clip(-32768, 32767).astype("<i2").tobytes()
    assert frames_before_speech(noisy) == 10


def test_a_click_is_no_onset():
    click, pause = tone(0.04, 8000), bytes(5 * clip.FRAME_BYTES)
    assert frames_before_speech(pause + click + pause + tone(0.4, 16000)) == 12


@pytest.mark.parametrize("n_frames", [0, 1, 2, 3, 20])
def test_a_clip_without_an_onset_begins_at_once(n_frames):
    assert frames_before_speech(bytes(n_frames * clip.FRAME_BYTES)) == 0
    assert frames_before_speech(tone(n_frames * clip.FRAME_S, 16000)) == 0
