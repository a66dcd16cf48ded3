"""Sounds are mixed at the level and the delay that are asked for."""

import numpy as np
import pytest
from scipy.signal import correlate

from benchmark.turn_taking import sounds
from benchmark.turn_taking.timeline import SAMPLES_PER_MS, Span

NOISE = sounds.to_pcm(0.1 * np.random.default_rng(1).standard_normal(16000))


@pytest.mark.parametrize("db", [-10, -20, -30])
@pytest.mark.parametrize("delay_ms", [20, 100, 200, 400])
def test_an_echo_has_its_level_and_its_delay(db, delay_ms):
    late = delay_ms * SAMPLES_PER_MS
    heard = sounds.echo(NOISE, db, delay_ms)
    assert len(heard) == len(NOISE)
    assert not heard[:late].any()
    played_db = sounds.level_db(NOISE[: len(NOISE) - late])
    assert sounds.level_db(heard[late:]) == pytest.approx(played_db + db, abs=0.05)
    correlation = correlate(heard.astype(float), NOISE.astype(float), method="fft")
    assert np.argmax(correlation) - (len(NOISE) - 1) == late


def test_a_mix_is_the_sum_and_as_long_as_the_longest():
    mix = sounds.mixed(np.array([100, 200], np.int16), np.array([1000], np.int16))
    assert mix == pytest.approx([1100, 200], abs=1)


def test_a_sound_is_set_to_a_level():
    assert sounds.level_db(sounds.at_level(NOISE, -26)) == pytest.approx(-26, abs=0.05)


def speech_with_a_pause() -> np.ndarray:
    """Sound from 0.3 to 1.0 and from 1.5 to 2.0 s in a soft room."""
    pcm = sounds.lasting(sounds.soft_noise("room"), sounds.samples(2300)).copy()
    for start_ms, end_ms in ((300, 1000), (1500, 2000)):
        part = slice(sounds.samples(start_ms), sounds.samples(end_ms))
        pcm[part] = NOISE[: part.stop - part.start]
    return pcm


def test_sound_and_pauses_are_found_by_level():
    spans = sounds.sounding(speech_with_a_pause())
    assert spans == [Span(300, 1000), Span(1500, 2000)]
    assert sounds.gaps(spans) == [Span(1000, 1500)]


@pytest.mark.parametrize("length_ms", [200, 1400])
def test_a_pause_is_given_another_length(length_ms):
    pcm = speech_with_a_pause()
    longer, [pause] = sounds.with_pauses(pcm, [Span(1000, 1500)], [length_ms], pcm[:4800])
    assert pause == Span(1000, 1000 + length_ms)
    assert len(longer) == len(pcm) + sounds.samples(length_ms - 500)
    assert sounds.gaps(sounds.sounding(longer)) == [pause]


def test_what_is_drawn_depends_only_on_the_name():
    first, again, other = (sounds.keyboard(sounds.rng_of(name), 16000) for name in ("a", "a", "b"))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("make", [sounds.keyboard, sounds.music, sounds.cough])
def test_a_noise_fills_its_time_and_sounds(make):
    sound = make(sounds.rng_of("x"), 16000)
    assert sound.shape == (16000,)
    assert np.abs(sound).max() > 0.1
