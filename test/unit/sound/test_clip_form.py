"""Claims about the form that a model hears recordings in."""

import numpy as np
import pytest

from sglang_live.core import AudioPart, HistoryItem
from sglang_live.errors import BadInputError
from sglang_live.sound.clip_form import CONFIG_KEY, ClipForm
from sglang_live.stages.thinker.items import formed

RATE_HZ = 16_000
FORM = ClipForm(before_s=0.3, after_s=0.5, least_peak=0.03)
BEFORE, AFTER = 4800, 8000


def speech(seconds: float = 1.0, peak: float = 0.5, seed: int = 1) -> np.ndarray:
    """Noise in syllables: loud from its first to its last sample, with pauses in it."""
    rng = np.random.default_rng(seed)
    n = int(seconds * RATE_HZ)
    loudness = 0.3 + 0.7 * np.abs(np.cos(np.arange(n) / n * 8 * np.pi))
    loudness[n // 4 : n // 3] = 0.0
    sound = rng.standard_normal(n) * loudness
    sound -= sound.mean()
    return (peak * sound / np.abs(sound).max()).astype(np.float32)


def test_silence_is_added_where_sound_begins_and_ends_with_the_clip():
    sound = speech()
    made = FORM.of_clip(sound)
    assert len(made) == BEFORE + len(sound) + AFTER
    assert np.allclose(made[BEFORE:-AFTER], sound, atol=1e-6)
    assert not made[:BEFORE].any() and not made[-AFTER:].any()


@pytest.mark.parametrize(("before_s", "after_s"), [(0.3, 0.5), (0.4, 0.9), (0.1, 0.0), (2.0, 0.2)])
def test_sound_begins_at_one_place_whatever_silence_is_before_it(before_s, after_s):
    sound = np.pad(speech(), (int(before_s * RATE_HZ), int(after_s * RATE_HZ)))
    made = FORM.of_clip(sound)
    assert abs(np.flatnonzero(np.abs(made) > 0.05)[0] - BEFORE) < 0.01 * RATE_HZ
    assert len(made) == pytest.approx(BEFORE + RATE_HZ + max(0.5, after_s) * RATE_HZ, abs=160)


def test_noise_around_speech_is_no_sound():
    rng = np.random.default_rng(2)
    sound = np.pad(speech(), (BEFORE, AFTER))
    sound = sound + 0.02 * rng.standard_normal(len(sound)).astype(np.float32)
    assert len(FORM.of_clip(sound)) - len(sound) < 0.03 * RATE_HZ


def test_a_constant_offset_is_taken_away_before_silence_is_added():
    made = FORM.of_clip(speech() + np.float32(0.2))
    assert len(made) == BEFORE + RATE_HZ + AFTER
    assert np.allclose(made[BEFORE:-AFTER], speech(), atol=1e-5)


def test_a_quiet_clip_is_amplified_and_a_piece_of_an_utterance_is_not():
    assert np.abs(FORM.of_clip(speech(peak=0.005))).max() == pytest.approx(0.03, rel=1e-3)
    assert np.abs(FORM.of_clip(speech(peak=0.001))).max() == pytest.approx(0.01, rel=1e-3)
    piece = FORM.of_clip(speech(peak=0.005), ends=False)
    assert np.abs(piece).max() == pytest.approx(0.005, rel=1e-3)


def test_silence_is_added_to_the_ends_of_an_utterance_alone():
    n = RATE_HZ
    assert len(FORM.of_clip(speech(), ends=False)) == BEFORE + n
    assert len(FORM.of_clip(speech(), begins=False)) == n + AFTER
    assert len(FORM.of_clip(speech(), begins=False, ends=False)) == n


@pytest.mark.parametrize("n_samples", [0, 1, 7, 159, 160, 161, 1000])
@pytest.mark.parametrize("value", [0.0, 0.1, -1.0])
def test_clips_of_any_length_and_level_are_taken(n_samples, value):
    constant = np.full(n_samples, value, np.float32)
    assert len(FORM.of_clip(constant)) == n_samples  # no sound
    sound = speech(1.0)[:n_samples]
    assert np.isfinite(FORM.of_clip(sound)).all()


def test_an_item_keeps_its_text_and_its_place_in_the_message():
    pcm = (speech() * 32767).astype(np.int16)
    item = HistoryItem(key="k", role="user", parts=(AudioPart(pcm),), closes=False)
    with_form = formed(item, FORM)
    [part] = with_form.parts
    assert (with_form.key, with_form.opens, with_form.closes) == ("k", True, False)
    assert part.pcm.dtype == np.int16 and len(part.pcm) == BEFORE + len(pcm)


def test_a_checkpoint_names_its_form_and_one_without_it_hears_clips_as_they_are():
    named = {"before_s": 0.3, "after_s": 0.5, "least_peak": 0.03}
    assert ClipForm.of({CONFIG_KEY: named}) == FORM
    assert ClipForm.of({}) is None
    for wrong in ({"before_s": 0.3}, {**named, "before_s": "x"}, [], {**named, "after_s": 2.0}):
        with pytest.raises(BadInputError, match=CONFIG_KEY):
            ClipForm.of({CONFIG_KEY: wrong})
