"""The components decide as the gateway does, at the times that their settings imply."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from benchmark.turn_taking.clips import grouped
from benchmark.turn_taking.components import (
    VERDICT_MS,
    EndRule,
    Hearing,
    RememberedScores,
    hear_ends,
    hear_interruptions,
    semantic_rules,
)
from sglang_live.interaction.silero import CONTEXT_SAMPLES, SpeechState
from sglang_live.interaction.turn_end import SCORED_AT_MS, cutoff_ms, judged, word_evidence
from sglang_live.interaction.vad import VadSettings

RATE = 16


@dataclass
class FakeSpeech:
    """Scores a window as speech if it sounds, and counts the windows."""

    windows: int = 0

    def initial_state(self) -> SpeechState:
        return SpeechState(np.zeros(1), np.zeros(1))

    def score(self, batch):
        [(windows, state)] = batch
        self.windows += len(windows)
        loud = np.abs(windows[:, CONTEXT_SAMPLES:]).mean(axis=1) > 0.05
        return [(loud.astype(np.float32), state)]


@dataclass
class FakeEndpoint:
    """Scores turns by their length; keeps what it heard."""

    complete_from_ms: int
    complete: float = 0.9
    heard_ms: list[int] = field(default_factory=list)

    def completeness(self, pcm: np.ndarray) -> float:
        self.heard_ms.append(len(pcm) // RATE)
        return self.complete if len(pcm) >= self.complete_from_ms * RATE else 0.1


def sound(*parts: tuple[int, int]) -> np.ndarray:
    """Parts of (voiced, silent) ms. All edges lie on windows of 32 ms."""
    pieces = []
    for voiced_ms, silent_ms in parts:
        pieces += [np.full(voiced_ms * RATE, 8000), np.zeros(silent_ms * RATE)]
    return np.concatenate(pieces).astype(np.int16)


def hearing(pcm: np.ndarray, endpoint: FakeEndpoint | None = None) -> Hearing:
    return Hearing(pcm, RememberedScores(FakeSpeech()), endpoint)


def silence(ms: int) -> EndRule:
    return EndRule("server_vad", f"{ms} ms", VadSettings(silence_duration_ms=ms))


@pytest.mark.parametrize(("ms", "n_ends"), [(320, 2), (640, 1)])
def test_silence_ends_a_turn_when_it_has_lasted(ms, n_ends):
    decisions = hear_ends(hearing(sound((1024, 512), (1024, 2048))), silence(ms))
    assert len(decisions) == n_ends
    # Known when the packet arrives in which the last window of the silence ends.
    assert 0 <= decisions[-1].at_ms - (2560 + ms) < 20


def smart_turn(min_score: float = 0.5) -> EndRule:
    settings = VadSettings(silence_duration_ms=2000, pause_ms=200)
    return EndRule("Smart Turn", f"{min_score:g}", settings, min_score)


def semantic(setting: str) -> EndRule:
    [rule] = [rule for rule in semantic_rules() if rule.setting == setting]
    return rule


def test_the_model_ends_a_turn_after_the_pause_and_its_verdict():
    endpoint = FakeEndpoint(complete_from_ms=1500)
    [ended] = hear_ends(hearing(sound((1024, 512), (1024, 2048)), endpoint), smart_turn())
    assert 200 + VERDICT_MS <= ended.at_ms - 2560 < 200 + VERDICT_MS + 32 + 20
    # It heard the whole turn both times: the first pause did not end it.
    assert endpoint.heard_ms == [1024 + 224, 2560 + 224]


def test_without_a_verdict_the_longest_silence_ends_the_turn():
    endpoint = FakeEndpoint(complete_from_ms=60_000)
    [ended] = hear_ends(hearing(sound((1024, 4096)), endpoint), smart_turn())
    assert 0 <= ended.at_ms - (1024 + 2000) < 40


@pytest.mark.parametrize("eagerness", ["low", "medium", "high"])
@pytest.mark.parametrize("score", [0.0, 0.5, 1.0])
def test_semantic_vad_waits_for_as_long_as_the_score_calls_for(eagerness, score):
    endpoint = FakeEndpoint(complete_from_ms=0, complete=score)
    [ended] = hear_ends(hearing(sound((1024, 4096)), endpoint), semantic(eagerness))
    wait_ms = judged(score, cutoff_ms(eagerness)).wait_ms
    assert 0 <= ended.at_ms - 1024 - max(wait_ms, 224 + VERDICT_MS) < 60


def test_semantic_vad_scores_a_pause_again_while_it_lasts():
    endpoint = FakeEndpoint(complete_from_ms=0, complete=0.0)
    hear_ends(hearing(sound((1024, 4096)), endpoint), semantic("low"))
    silences_ms = [heard_ms - 1024 for heard_ms in endpoint.heard_ms]
    assert len(silences_ms) == len(SCORED_AT_MS)
    assert all(0 <= s - due < 64 for s, due in zip(silences_ms, SCORED_AT_MS, strict=True))


@dataclass
class FakeRecogniser:
    text: str

    def transcribe(self, pcm: np.ndarray) -> str:
        return self.text


@pytest.mark.parametrize("text", ["And then, um.", "Thank you."])
def test_words_change_how_long_semantic_vad_waits(text):
    own = hearing(sound((1024, 4096)), FakeEndpoint(complete_from_ms=0, complete=0.5))
    own.recogniser = FakeRecogniser(text)
    [ended] = hear_ends(own, replace(semantic("medium"), hears_words=True))
    wait_ms = judged(0.5, cutoff_ms("medium"), word_evidence(text)).wait_ms
    assert 0 <= ended.at_ms - 1024 - wait_ms < 60


def test_a_verdict_that_comes_after_the_voice_is_dropped():
    endpoint = FakeEndpoint(complete_from_ms=0)
    decisions = hear_ends(hearing(sound((1024, 224), (1024, 2048)), endpoint), smart_turn())
    assert len(decisions) == 1 and decisions[0].at_ms > 2272


def test_a_voice_holds_the_agent_and_stops_it_when_it_lasts():
    held, stopped = hear_interruptions(hearing(sound((0, 1024), (640, 1024))), 250, False)
    assert (held.kind, stopped.kind) == ("held", "stopped")
    assert 96 <= held.at_ms - 1024 < 96 + 20
    assert 250 <= stopped.at_ms - 1024 < 250 + 32 + 20


def test_a_short_voice_only_holds_the_agent():
    held, released = hear_interruptions(hearing(sound((0, 1024), (192, 1024))), 250, False)
    assert (held.kind, released.kind) == ("held", "released")
    assert 200 <= released.at_ms - (1024 + 192) < 200 + 32 + 20


@pytest.mark.parametrize(("hiss_ms", "until_ms"), [(0, 480), (64, 250)])
def test_a_voice_without_hiss_must_outlast_a_backchannel(hiss_ms, until_ms):
    times = np.arange(1024 * RATE) / 16_000
    voice = 8000 * np.sin(2 * np.pi * 200 * times)
    hiss = np.random.default_rng(1).normal(0, 4000, hiss_ms * RATE)
    voice[128 * RATE : (128 + hiss_ms) * RATE] = np.diff(hiss, prepend=0)
    pcm = np.concatenate((np.zeros(1024 * RATE), voice, np.zeros(512 * RATE))).astype(np.int16)
    held, stopped = hear_interruptions(hearing(pcm), 250, True)
    assert (held.kind, stopped.kind) == ("held", "stopped")
    assert until_ms <= stopped.at_ms - 1024 < until_ms + 32 + 20


def test_a_voice_far_softer_and_duller_than_the_user_is_not_heard():
    times = np.arange(2048 * RATE) / 16_000
    dull = np.sin(2 * np.pi * 200 * times)
    bright = 0.3 * np.random.default_rng(1).normal(0, 1, len(times))
    far = hearing(np.concatenate((np.zeros(1024 * RATE), 3000 * dull)).astype(np.int16))
    assert hear_interruptions(far, 250, True)[-1].kind == "stopped"
    far.earlier = (10_000 * (dull + bright)).astype(np.int16)
    assert hear_interruptions(far, 250, True) == []


def test_the_agents_own_sound_does_not_stop_it_when_echoes_are_ignored():
    playing = np.random.default_rng(1).normal(0, 8000, 4 * 16_000).clip(-32_000, 32_000)
    echo = np.concatenate((np.zeros(1_600), 0.4 * playing))[: len(playing)].astype(np.int16)
    own = hearing(echo)
    own.playing = playing.astype(np.int16)
    assert [found.kind for found in hear_interruptions(own, 250, False)] == ["held", "stopped"]
    assert hear_interruptions(own, 250, True) == []


def test_windows_are_scored_once_for_all_rules():
    model = FakeSpeech()
    own = Hearing(sound((1024, 2048)), RememberedScores(model))
    first = hear_ends(own, silence(320))
    n_windows = model.windows
    assert hear_ends(own, silence(320)) == first
    assert model.windows == n_windows > 0


def test_recordings_that_share_a_speaker_are_one_group():
    speakers = {"a": ["x", "y"], "b": ["z"], "c": ["y", "w"], "d": ["z"]}
    assert grouped(speakers) == {"a": "w", "c": "w", "b": "z", "d": "z"}
