"""Voices of questions: held-out ones are not in training; accents change single sounds."""

import random

from training.demo.voices import Cast, HeldOutCast, Voice, shifted

MANY = 3000


def _met(cast: Cast | HeldOutCast) -> list[Voice]:
    return [cast.next() for _ in range(MANY)]


def test_training_never_has_a_held_out_voice():
    def parts(voices: list[Voice]) -> set[str]:
        """Accents, speakers and voices of flite, each by its name."""
        return {part for voice in voices for part in voice.name.split("+")}

    trained, held_out = (
        parts(_met(Cast(random.Random(1)))),
        parts(_met(HeldOutCast(random.Random(1)))),
    )
    assert len(trained) > 60 and len(held_out) == 8
    assert not trained & held_out


def test_held_out_voices_have_no_shifted_sounds():
    assert not any(voice.shifts for voice in _met(HeldOutCast(random.Random(1))))


def test_most_speakers_of_espeak_have_an_accent_of_their_own():
    speakers = [v for v in _met(Cast(random.Random(1))) if v.program == "espeak-ng"]
    own = [voice.shifts for voice in speakers if voice.shifts]
    assert 0.5 < len(own) / len(speakers) < 0.8
    assert len(set(own)) > 0.99 * len(own)


def test_an_accent_changes_its_sounds_and_leaves_stress_and_others():
    spelt = "m_aI n_'eI_m I_z"
    assert shifted(spelt, {}) == "m|aI n|'eI|m I|z"
    assert shifted(spelt, {"eI": "aI", "z": "s"}) == "m|aI n|'aI|m I|s"
