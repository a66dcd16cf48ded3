import base64
import json

import numpy as np
import pytest

from sglang_live.client import clip
from sglang_live.client.utterance import Utterance, silence_message

LOUD = np.full(clip.FRAME_BYTES // 2, 8000, "<i2").tobytes()
QUIET = bytes(clip.FRAME_BYTES)


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
