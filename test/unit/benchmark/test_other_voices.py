"""Claims about the measure of other voices."""

import numpy as np
import pytest

from benchmark.summary import RESULTS, newest
from benchmark.turn_taking.clips import Clip
from benchmark.turn_taking.components import Hearing, RememberedScores
from benchmark.turn_taking.cutting import Unit
from benchmark.turn_taking.equal_errors import by_speaker, equal_error, voice_of
from benchmark.turn_taking.page import OTHER_VOICES, PAGE, other_voices
from benchmark.turn_taking.speakers import Listening, RememberedEmbeddings
from benchmark.turn_taking.stimuli import CHANGES
from test.unit.gateway.fakes import LoudnessModel

RATE = 16_000
NOISE = np.random.default_rng(3).normal(0, 8000, 2 * RATE).clip(-32768, 32767).astype(np.int16)
SILENCE = np.zeros(RATE, np.int16)


class FakeSpeakerModel:
    """Loud sounds are of one speaker, soft ones of another."""

    def __init__(self) -> None:
        self.n_calls = 0

    def embed(self, sounds, lengths=()):
        self.n_calls += 1
        loud = np.array([np.abs(pcm).mean() > 3200 for pcm in sounds])
        found = np.where(loud[:, None], [1.0, 0.0], [0.0, 1.0]).astype(np.float32)
        return np.tile(found, (max(1, len(lengths)), 1, 1))


def decisions(voice: np.ndarray, earlier: np.ndarray | None) -> list[str]:
    pcm = np.concatenate((SILENCE, voice, SILENCE))
    hearing = Hearing(pcm, RememberedScores(LoudnessModel()), earlier=earlier)
    model = RememberedEmbeddings(FakeSpeakerModel())
    return [each.kind for each in Listening(hearing, model, 250).decisions()]


def test_the_users_voice_stops_the_agent_and_another_one_only_holds_it():
    soft = (NOISE * 0.4).astype(np.int16)
    assert decisions(NOISE, NOISE) == ["held", "stopped"]
    assert decisions(soft, NOISE)[:2] == ["held", "released"]
    assert "stopped" not in decisions(soft, NOISE)


def test_without_an_earlier_turn_any_voice_stops_it():
    assert decisions((NOISE * 0.4).astype(np.int16), None) == ["held", "stopped"]


def test_an_embedding_is_computed_once():
    model = FakeSpeakerModel()
    remembered = RememberedEmbeddings(model)
    for _ in range(2):
        remembered.embed([NOISE])
    remembered.embed([NOISE], (4096,))
    assert model.n_calls == 2


@pytest.mark.parametrize(
    ("same", "other", "rate"),
    [([0.9, 0.8], [0.1, 0.2], 0.0), ([0.9, 0.1], [0.8, 0.0], 0.5), ([0.5] * 4, [0.5] * 4, 0.5)],
)
def test_the_equal_error_rate_is_where_both_kinds_of_errors_are_as_frequent(same, other, rate):
    assert equal_error(np.array(same), np.array(other)) == pytest.approx(rate)


def test_of_a_meeting_only_what_has_one_voice_counts():
    units = (Unit("a", 0, 500), Unit("b", 400, 900), Unit("a", 1000, 1500))
    found = by_speaker([Clip("m", "multiparty", "g", NOISE, units)])
    assert {name: [len(pcm) for pcm in parts] for name, parts in found.items()} == {"a": [8000]}


def test_silence_is_no_voice():
    assert len(voice_of([np.concatenate((NOISE, SILENCE, NOISE))])) == 2 * len(NOISE)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_voice_is_other_audio_of_about_the_same_length(change):
    changed = CHANGES[change](NOISE, "name")
    assert changed.dtype == np.int16
    assert 0.9 < len(changed) / len(NOISE) < 1.1
    assert not np.array_equal(changed[:RATE], NOISE[:RATE])


def test_the_page_holds_the_newest_document():
    begin, end = OTHER_VOICES
    assert f"{begin}\n{other_voices(newest(RESULTS, 'other_voices'))}\n{end}" in PAGE.read_text()
