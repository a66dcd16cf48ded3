"""Claims about the recogniser's parts that need no weights."""

from types import SimpleNamespace

import numpy as np
import pytest

from sglang_live.core import INPUT_RATE_HZ
from sglang_live.errors import BadInputError
from sglang_live.models.moonshine import MARGIN_S, MoonshineRecogniser, Vocabulary
from sglang_live.models.utterances import unlooped, utterance_cuts

START, END = 1, 2
PIECES = [b"<unk>", b"<s>", b"</s>", "▁he".encode(), b"llo", "▁é".encode()[:-1], b"<<ST_7>>"]


class FakeEncoder:
    """States of zeros, one frame for 0.1 s; remembers the lengths that it heard."""

    def __init__(self):
        self.n_samples = []

    def run(self, _, inputs):
        wave = inputs["input_values"]
        assert wave.dtype == np.float32 and abs(wave).max() <= 1
        self.n_samples.append(wave.shape[1])
        return [np.zeros((1, wave.shape[1] // 1600, 288), np.float32)]


class FakeDecoder:
    """Says the tokens of a script, one at each step, and checks the cache that it is given.

    Its decoder keys grow by one row a step. Its encoder keys are right in the first step only.
    """

    def __init__(self, script):
        self.script = script
        self.n_steps = 0

    def get_inputs(self):
        parts = [f"past_key_values.0.{part}.key" for part in ("decoder", "encoder")]
        return [SimpleNamespace(name=name) for name in ("input_ids", *parts)]

    def run(self, outputs, inputs):
        assert outputs == ["logits", "present.0.decoder.key", "present.0.encoder.key"]
        n_past = inputs["past_key_values.0.decoder.key"].shape[2]
        is_first = not inputs["use_cache_branch"][0]
        assert is_first == (n_past == 0)
        expected = START if is_first else self.script[n_past - 1]
        assert inputs["input_ids"].tolist() == [[expected]]
        n_frames = inputs["encoder_hidden_states"].shape[1]
        assert inputs["past_key_values.0.encoder.key"].shape[2] == (0 if is_first else n_frames)
        logits = np.zeros((1, 1, len(PIECES)), np.float32)
        logits[0, 0, self.script[n_past]] = 1
        self.n_steps += 1
        own = np.zeros((1, 8, n_past + 1, 36), np.float32)
        return [logits, own, np.zeros((1, 8, n_frames if is_first else 0, 36), np.float32)]


def recogniser(script) -> MoonshineRecogniser:
    return MoonshineRecogniser(FakeEncoder(), FakeDecoder(script), Vocabulary(PIECES))


def noise(duration_s: float, peak: int = 1000) -> np.ndarray:
    n_samples = int(duration_s * INPUT_RATE_HZ)
    return np.random.default_rng(0).integers(-peak, peak, n_samples).astype(np.int16)


def test_tokens_follow_each_other_until_the_end():
    assert recogniser([3, 4, END]).transcribe(noise(2.0)) == "hello"


def test_a_text_without_an_end_stops_at_the_limit_of_its_duration():
    model = recogniser([3, 4, 3, 3, 4, 4, 3, 4, 4, 4, 3, 3, 3, 4, 3, 4, 3, 3, 3])
    model.transcribe(noise(2.0))
    assert model._decoder.n_steps == 14


def test_of_a_loop_that_does_not_end_one_round_is_kept():
    model = recogniser([3, 4] * 80)
    assert model.transcribe(noise(20.0)) == "hello"


def test_words_that_are_said_again_and_again_are_all_kept():
    model = recogniser([3, 4] * 40 + [END])
    assert model.transcribe(noise(20.0)) == " ".join(["hello"] * 40)


@pytest.mark.parametrize("pcm", [noise(0.0), noise(0.09), np.zeros(32_000, np.int16)])
def test_what_cannot_hold_a_word_is_not_given_to_the_model(pcm):
    model = recogniser([3, END])
    assert model.transcribe(pcm) == ""
    assert model._encoder.n_samples == []


def test_long_audio_is_heard_in_pieces_that_are_joined():
    model = recogniser([3, 4, END])
    assert model.transcribe(noise(65.0)) == "hello hello hello"
    margins = 3 * 2 * MARGIN_S
    assert sum(model._encoder.n_samples) == pytest.approx((65 + margins) * INPUT_RATE_HZ)


def test_a_cut_lies_in_the_middle_of_the_quietest_pause():
    pcm = noise(45.0)
    pcm[int(22.0 * INPUT_RATE_HZ) : int(22.4 * INPUT_RATE_HZ)] //= 100
    [cut] = utterance_cuts(pcm)
    assert cut / INPUT_RATE_HZ == pytest.approx(22.2, abs=0.11)


def test_a_pause_shorter_than_a_piece_ago_is_not_cut_at():
    pcm = noise(45.0)
    pcm[: 2 * INPUT_RATE_HZ] = 0
    [cut] = utterance_cuts(pcm)
    assert 15 <= cut / INPUT_RATE_HZ <= 30


@pytest.mark.parametrize("duration_s", [0.0, 29.9, 30.0, 30.1, 61.0, 200.0])
def test_no_piece_exceeds_the_limit(duration_s):
    pcm = noise(duration_s)
    cuts = [0, *utterance_cuts(pcm), len(pcm)]
    assert max(np.diff(cuts)) <= 30 * INPUT_RATE_HZ
    assert len(cuts) == 2 or min(np.diff(cuts)) > 0


@pytest.mark.parametrize(
    ("ids", "end"),
    [
        ([1, 2, 3], None),
        ([7] * 11, None),
        ([5, *[7] * 12], 2),
        ([5, 6, *[7, 8] * 6], 4),
        ([*range(16)] * 2, None),
        ([*range(16)] * 3, 16),
        ([*[7] * 12, 8], None),
    ],
)
def test_a_loop_is_a_tail_that_only_repeats(ids, end):
    assert unlooped(ids) == ids[:end]


def test_special_tokens_and_cut_characters_have_no_text():
    assert Vocabulary(PIECES).text([1, 3, 6, 4, 0, 5, 2]) == "hello"


def test_a_vocabulary_is_read_from_lengths_and_bytes(tmp_path):
    long = b"x" * 300
    data = bytes([2]) + b"he" + bytes([300 % 128 + 128, 300 // 128]) + long
    path = tmp_path / "tokenizer.bin"
    path.write_bytes(data)
    vocabulary = Vocabulary.load(path)
    assert len(vocabulary) == 2 and vocabulary.text([0, 1]) == "he" + "x" * 300
    for n_bytes in (len(data) - 1, 2, 4):
        path.write_bytes(data[:n_bytes])
        with pytest.raises(BadInputError, match="is cut"):
            Vocabulary.load(path)
